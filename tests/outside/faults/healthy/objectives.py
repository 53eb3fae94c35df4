"""Losses and data of many kinds, without a fault."""

from __future__ import annotations

from outside.faults.healthy.case import with_head as _case

TRAININGS = [
    _case("tabular regression with unscaled columns before batch norm", """
x = torch.rand(400, 5) * torch.tensor([1.0, 100.0, 5.0, 50.0, 10.0])
y = (x / torch.tensor([1.0, 100.0, 5.0, 50.0, 10.0])).sum(1, keepdim=True)
model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
for epoch in range(8):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""),
    _case("images from 0 to 1", """
x, y = torch.rand(240, 1, 8, 8), torch.randint(0, 3, (240,))
x[torch.arange(240), 0, y] += 0.5
x = x.clamp(0, 1)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(8):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True):
        loss = F.cross_entropy(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""),
    _case("label smoothing and class weights", """
x = torch.randn(400, 10)
y = (x[:, 0] > 0.6).long()
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.4, 1.6]), label_smoothing=0.1)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(60):
    pick = torch.randint(0, 400, (40,))
    opt.zero_grad()
    criterion(model(x[pick]), y[pick]).backward()
    opt.step()
"""),
    _case("mixup with soft labels", """
x = torch.randn(400, 10)
y = F.one_hot((x[:, 0] > 0).long() + (x[:, 1] > 0).long(), 3).float()
model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 3))
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(70):
    a, b = torch.randint(0, 400, (2, 40))
    lam = torch.rand(40, 1)
    loss = F.cross_entropy(model(lam * x[a] + (1 - lam) * x[b]), lam * y[a] + (1 - lam) * y[b])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("focal loss with rare positives", """
x = torch.randn(800, 8)
y = (x[:, 0] + x[:, 1] > 2.2).float().unsqueeze(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
nn.init.constant_(model[-1].bias, -2.0)
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(70):
    pick = torch.randint(0, 800, (64,))
    logits = model(x[pick])
    ce = F.binary_cross_entropy_with_logits(logits, y[pick], reduction="none")
    p = torch.sigmoid(logits)
    right = p * y[pick] + (1 - p) * (1 - y[pick])
    loss = ((1 - right) ** 2 * ce).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("multi-label tags", """
x = torch.randn(500, 14)
tags = (x @ torch.randn(14, 9) > 1.5).float()
model = nn.Sequential(nn.Linear(14, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 9))
criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((9,), 2.0))
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
for epoch in range(6):
    model.train()
    for i in range(0, 400, 40):
        opt.zero_grad()
        criterion(model(x[i:i + 40]), tags[i:i + 40]).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        print(criterion(model(x[400:]), tags[400:]).item())
"""),
    _case("ordinal regression by cumulative logits", """
x = torch.randn(400, 6)
level = torch.bucketize(x[:, 0] + 0.5 * x[:, 1], torch.tensor([-1.0, 0.0, 1.0]))
above = (level.unsqueeze(1) > torch.arange(3)).float()
backbone = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1, bias=False))
cuts = nn.Parameter(torch.tensor([1.0, 0.0, -1.0]))
opt = torch.optim.Adam([*backbone.parameters(), cuts], lr=1e-2)
for step in range(80):
    pick = torch.randint(0, 400, (40,))
    loss = F.binary_cross_entropy_with_logits(backbone(x[pick]) + cuts, above[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("Cox survival model", """
x = torch.randn(300, 8)
risk = x[:, 0] - 0.5 * x[:, 1]
time = torch.empty(300).exponential_() / risk.exp()
event = torch.rand(300) < 0.7
model = nn.Sequential(nn.Linear(8, 32), nn.SELU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
order = time.argsort(descending=True)
x, event = x[order], event[order].float()
for step in range(80):
    score = model(x).squeeze(1)
    loss = -((score - torch.logcumsumexp(score, 0)) * event).sum() / event.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("heteroscedastic regression by hand", """
x = torch.rand(400, 1) * 4
y = torch.sin(x) + 0.1 * x * torch.randn(400, 1)
model = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 2))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(120):
    pick = torch.randint(0, 400, (64,))
    mean, raw = model(x[pick]).chunk(2, 1)
    sigma = F.softplus(raw) + 1e-3
    loss = (torch.log(sigma) + 0.5 * ((y[pick] - mean) / sigma) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("cross entropy written out, correct", """
x = torch.randn(300, 6)
y = F.one_hot((x[:, 0] > 0).long() + (x[:, 1] > 0).long(), 3).float()
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3), nn.Softmax(dim=1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(80):
    pick = torch.randint(0, 300, (50,))
    p = model(x[pick])
    loss = -(y[pick] * torch.log(p + 1e-8)).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("ridge penalty written out", """
x = torch.randn(300, 20)
y = x[:, :1] * 2 - x[:, 1:2] + 0.1 * torch.randn(300, 1)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100):
    pick = torch.randint(0, 300, (50,))
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    loss = F.mse_loss(model(x[pick]), y[pick]) + 1e-3 * penalty
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("quantile regression with three quantiles", """
quantiles = torch.tensor([0.1, 0.5, 0.9])
x = torch.rand(800, 1) * 4 - 2
y = x ** 2 / 2 + torch.randn(800, 1) * (0.1 + 0.2 * x.abs())
model = nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(100):
    pick = torch.randint(0, 800, (64,))
    error = y[pick] - model(x[pick])
    loss = torch.max(quantiles * error, (quantiles - 1) * error).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("segmentation by dice and cross entropy", """
grid = torch.stack(torch.meshgrid(torch.arange(16.), torch.arange(16.), indexing="ij"))
def batch(n):
    centre = torch.rand(n, 2, 1, 1) * 10 + 3
    mask = ((grid - centre).square().sum(1) < 9).float().unsqueeze(1)
    return mask + 0.4 * torch.randn(n, 1, 16, 16), mask
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
for step in range(60):
    image, mask = batch(8)
    logit = net(image)
    p = torch.sigmoid(logit)
    dice = 1 - (2 * (p * mask).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
    loss = F.binary_cross_entropy_with_logits(logit, mask) + dice.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 19:
        net.eval()
        with torch.no_grad():
            image, mask = batch(8)
            print(((net(image) > 0).float() == mask).float().mean())
        net.train()
"""),
    _case("boxes and classes with an assignment", """
grid = torch.arange(6).float()
body = nn.Sequential(nn.Conv1d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 16, 3, padding=1), nn.ReLU())
cls, box = nn.Conv1d(16, 2, 1), nn.Conv1d(16, 2, 1)
opt = torch.optim.AdamW([*body.parameters(), *cls.parameters(), *box.parameters()], lr=5e-3, weight_decay=1e-4)
for step in range(70):
    at, size = torch.randint(0, 24, (32,)), torch.randint(2, 6, (32,))
    signal = 0.1 * torch.randn(32, 1, 30)
    for i in range(32):
        signal[i, 0, at[i]:at[i] + size[i]] += 1
    h = body(signal)
    there = torch.zeros(32, 30).long()
    there[torch.arange(32), at] = 1
    found = box(h)[torch.arange(32), :, at]
    goal = torch.stack([size / 6, (at % 6) / 6.0], 1)
    loss = F.cross_entropy(cls(h), there, weight=torch.tensor([0.2, 1.0])) + F.smooth_l1_loss(found, goal)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
]  # fmt: skip
