"""Trainings of representations, of one model by another, and of metrics, without a fault."""

from __future__ import annotations

from outside.faults.healthy.case import with_head as _case

TRAININGS = [
    _case("siamese", """
x = torch.randn(256, 10)
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for step in range(60):
    pick = torch.randint(0, 256, (32,))
    a, b = net(x[pick]), net(x[pick] + 0.1 * torch.randn(32, 10))
    other = net(x[torch.randint(0, 256, (32,))])
    loss = F.triplet_margin_loss(a, b, other)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("contrastive learning", """
x = torch.randn(256, 16)
net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(50):
    pick = torch.randperm(256)[:32]
    a = F.normalize(net(x[pick] + 0.1 * torch.randn(32, 16)), dim=1)
    b = F.normalize(net(x[pick] + 0.1 * torch.randn(32, 16)), dim=1)
    loss = F.cross_entropy(a @ b.T / 0.2, torch.arange(32))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("BYOL with a momentum encoder", """
import copy
data = torch.randn(512, 16)
online = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
target = copy.deepcopy(online)
for p in target.parameters():
    p.requires_grad_(False)
opt = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=1e-3)
for step in range(60):
    x = data[torch.randint(0, 512, (64,))]
    a, b = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
    with torch.no_grad():
        ta, tb = target(a), target(b)
    loss = 4 - 2 * (F.cosine_similarity(predictor(online(a)), tb).mean() + F.cosine_similarity(predictor(online(b)), ta).mean())
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p, q in zip(online.parameters(), target.parameters()):
            q.mul_(0.99).add_(p, alpha=0.01)
"""),
    _case("SimSiam with stop-gradient", """
data = torch.randn(512, 16)
encoder = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
predictor = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32))
opt = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9, weight_decay=1e-4)
for step in range(60):
    x = data[torch.randint(0, 512, (64,))]
    z1, z2 = encoder(x + 0.1 * torch.randn_like(x)), encoder(x + 0.1 * torch.randn_like(x))
    p1, p2 = predictor(z1), predictor(z2)
    loss = -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("InfoNCE over a batch of pairs", """
x, w = torch.randn(512, 12), torch.randn(12, 20)
pairs = x @ w / 4
image, text = nn.Linear(12, 16), nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 16))
scale = nn.Parameter(torch.tensor(2.6))
opt = torch.optim.AdamW([*image.parameters(), *text.parameters(), scale], lr=3e-3)
for step in range(70):
    pick = torch.randint(0, 512, (32,))
    a, b = F.normalize(image(x[pick]), dim=1), F.normalize(text(pairs[pick]), dim=1)
    logits = a @ b.t() * scale.exp()
    labels = torch.arange(32)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("triplets with hard negatives", """
x = torch.randn(300, 10)
y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(60):
    pick = torch.randint(0, 300, (48,))
    z, labels = F.normalize(net(x[pick]), dim=1), y[pick]
    distance = torch.cdist(z, z)
    same = labels[:, None] == labels[None]
    positive = (distance * same).max(1).values
    negative = (distance + 10 * same).min(1).values
    loss = F.relu(positive - negative + 0.3).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("distillation", """
x = torch.randn(512, 12)
y = (x @ torch.randn(12, 4)).argmax(1)
teacher = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
student = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
for model, lr in ((teacher, 1e-2), (student, 5e-3)):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(40):
        pick = torch.randint(0, 512, (64,))
        out = model(x[pick])
        loss = F.cross_entropy(out, y[pick])
        if model is student:
            with torch.no_grad():
                soft = F.softmax(teacher(x[pick]) / 2, 1)
            loss = 0.5 * loss + 2 * F.kl_div(F.log_softmax(out / 2, 1), soft, reduction="batchmean")
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
"""),
    _case("mean teacher with an average of weights", """
import copy
x = torch.randn(300, 10)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for step in range(60):
    pick = torch.randint(0, 300, (32,))
    out = model(x[pick])
    with torch.no_grad():
        goal = ema(x[pick]).softmax(1)
    loss = F.cross_entropy(out, y[pick]) + 0.1 * F.mse_loss(out.softmax(1), goal)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p, q in zip(ema.parameters(), model.parameters()):
            p.mul_(0.95).add_(q, alpha=0.05)
"""),
    _case("stochastic weight averaging", """
from torch.optim.swa_utils import AveragedModel, update_bn
x = torch.randn(400, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
averaged = AveragedModel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(6):
    model.train()
    for a, b in loader:
        opt.zero_grad()
        F.cross_entropy(model(a), b).backward()
        opt.step()
    if epoch > 2:
        averaged.update_parameters(model)
update_bn(loader, averaged)
averaged.eval()
with torch.no_grad():
    print(F.cross_entropy(averaged(x), y).item())
"""),
    _case("matrix factorisation for ratings", """
users, items = torch.randint(0, 40, (600,)), torch.randint(0, 30, (600,))
taste, kind = torch.randn(40, 3), torch.randn(30, 3)
ratings = (taste[users] * kind[items]).sum(1)
class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(40, 8), nn.Embedding(30, 8)
    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1)
model = Factors()
opt = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=1e-5)
for step in range(100):
    pick = torch.randint(0, 600, (64,))
    loss = F.mse_loss(model(users[pick], items[pick]), ratings[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("word vectors with negative samples", """
words = torch.randint(0, 50, (3000,))
inner, outer = nn.Embedding(50, 16), nn.Embedding(50, 16)
nn.init.uniform_(inner.weight, -0.03, 0.03)
nn.init.zeros_(outer.weight)
opt = torch.optim.Adam([*inner.parameters(), *outer.parameters()], lr=0.02)
for step in range(60):
    i = torch.randint(0, 2998, (128,))
    centre, context = words[i], words[i] // 5 * 5 + torch.randint(0, 5, (128,))
    noise = torch.randint(0, 50, (128, 5))
    v = inner(centre)
    positive = F.logsigmoid((v * outer(context)).sum(1))
    negative = F.logsigmoid(-torch.bmm(outer(noise), v.unsqueeze(2)).squeeze(2)).sum(1)
    loss = -(positive + negative).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("domain adaptation by gradient reversal", """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -0.3 * g

features = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
label, domain = nn.Linear(32, 2), nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.SGD([*features.parameters(), *label.parameters(), *domain.parameters()], lr=0.05, momentum=0.9)
for step in range(80):
    source, target = torch.randn(32, 8), torch.randn(32, 8) + 0.7
    y = (source[:, 0] > 0).long()
    h = features(torch.cat([source, target]))
    d = torch.cat([torch.zeros(32), torch.ones(32)]).long()
    loss = F.cross_entropy(label(h[:32]), y) + F.cross_entropy(domain(Reverse.apply(h)), d)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("Barlow twins", """
base = torch.randn(400, 20)
encoder = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
opt = torch.optim.Adam(encoder.parameters(), lr=2e-3)
for step in range(60):
    x = base[torch.randint(0, 400, (64,))]
    a, b = encoder(x + 0.2 * torch.randn_like(x)), encoder(x + 0.2 * torch.randn_like(x))
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    c = a.T @ b / 64
    diagonal = torch.diagonal(c)
    loss = (diagonal - 1).square().sum() + 0.01 * (c.square().sum() - diagonal.square().sum())
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("link prediction with sampled non-edges", """
n = 60
group = torch.arange(n) % 4
edges = torch.tensor([(i, j) for i in range(n) for j in range(n) if i != j and group[i] == group[j]])
adjacency = torch.eye(n)
adjacency[edges[:, 0], edges[:, 1]] = 1
adjacency = adjacency / adjacency.sum(1, keepdim=True)
feature = nn.Embedding(n, 16)
first, second = nn.Linear(16, 32), nn.Linear(32, 16)
opt = torch.optim.Adam([*feature.parameters(), *first.parameters(), *second.parameters()], lr=0.01)
for epoch in range(50):
    h = second(F.relu(adjacency @ first(adjacency @ feature.weight)))
    some = edges[torch.randint(0, len(edges), (128,))]
    none = torch.randint(0, n, (128, 2))
    score = torch.cat([(h[some[:, 0]] * h[some[:, 1]]).sum(1), (h[none[:, 0]] * h[none[:, 1]]).sum(1)])
    loss = F.binary_cross_entropy_with_logits(score, torch.cat([torch.ones(128), torch.zeros(128)]))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
]  # fmt: skip
