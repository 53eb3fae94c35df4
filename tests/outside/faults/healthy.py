"""Trainings of different kinds that have no fault: what a rule says of them is a false alarm."""

from __future__ import annotations

from outside.faults.bases import HEAD
from outside.faults.case import Healthy


def _case(name: str, text: str) -> Healthy:
    return Healthy(name, HEAD + text)


TRAININGS = [
    _case("GAN", """
real = torch.randn(512, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.7]]) + 2
G = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
g_opt, d_opt = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (G, D))
bce = nn.BCEWithLogitsLoss()
for step in range(60):
    x = real[torch.randint(0, 512, (64,))]
    with torch.no_grad():
        fake = G(torch.randn(64, 4))
    d_opt.zero_grad()
    loss = bce(D(x), torch.ones(64, 1)) + bce(D(fake), torch.zeros(64, 1))
    loss.backward()
    d_opt.step()
    g_opt.zero_grad()
    loss = bce(D(G(torch.randn(64, 4))), torch.ones(64, 1))
    loss.backward()
    g_opt.step()
"""),
    _case("VAE", """
data = torch.rand(512, 16).round()
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mu, self.logvar = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.dec = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16), nn.Sigmoid())
    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (logvar / 2).exp()
        return self.dec(z), mu, logvar
model = VAE()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(60):
    x = data[torch.randint(0, 512, (64,))]
    out, mu, logvar = model(x)
    loss = F.binary_cross_entropy(out, x, reduction="sum") / 64 - 0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("diffusion", """
data = torch.randn(512, 2) * 0.3 + 1
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))
model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(80):
    x = data[torch.randint(0, 512, (64,))]
    t = torch.rand(64, 1)
    noise = torch.randn_like(x)
    loss = F.mse_loss(model((1 - t).sqrt() * x + t.sqrt() * noise, t), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
model.eval()
with torch.no_grad():
    x = torch.randn(8, 2)
    for i in range(5):
        x = x - 0.1 * model(x, torch.full((8, 1), 1 - i / 5))
"""),
    _case("policy gradient", """
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(30):
    states = torch.randn(24, 4)
    dist = torch.distributions.Categorical(logits=policy(states))
    action = dist.sample()
    reward = ((states[:, 0] > 0).long() == action).float()
    loss = -(dist.log_prob(action) * (reward - reward.mean())).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("DQN with a target network", """
q = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
target = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
target.load_state_dict(q.state_dict())
opt = torch.optim.Adam(q.parameters(), lr=1e-3)
for step in range(60):
    s, s2, a = torch.randn(32, 4), torch.randn(32, 4), torch.randint(0, 3, (32, 1))
    r = (s[:, :1] > 0).float()
    with torch.no_grad():
        goal = r + 0.9 * target(s2).max(1, keepdim=True).values
    loss = F.smooth_l1_loss(q(s).gather(1, a), goal)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 19:
        target.load_state_dict(q.state_dict())
"""),
    _case("graph network", """
edges = (torch.rand(40, 40) < 0.15).float()
A = ((edges + edges.T > 0).float() + torch.eye(40))
A = A / A.sum(1, keepdim=True)
x, y = torch.randn(40, 8), torch.randint(0, 3, (40,))
x[torch.arange(40), y] += 2
class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x, A):
        return self.b(A @ F.relu(self.a(A @ x)))
model = GCN()
opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
train = torch.arange(40) < 28
for epoch in range(60):
    model.train()
    loss = F.cross_entropy(model(x, A)[train], y[train])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if epoch % 10 == 0:
        model.eval()
        with torch.no_grad():
            F.cross_entropy(model(x, A)[~train], y[~train])
"""),
    _case("vision transformer", """
images, labels = torch.randn(256, 3, 8, 8), torch.randint(0, 4, (256,))
images[torch.arange(256), 0, labels] += 2
class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 2, 2)
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        self.pos = nn.Parameter(torch.randn(1, 17, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)
    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])
model = ViT()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=40)
for step in range(40):
    pick = torch.randint(0, 256, (32,))
    loss = F.cross_entropy(model(images[pick]), labels[pick], label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    schedule.step()
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
    _case("fine-tuning a frozen backbone", """
x = torch.randn(256, 3, 8, 8)
y = (x.mean((1, 2, 3)) > 0).long()
backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
for p in backbone.parameters():
    p.requires_grad_(False)
backbone.eval()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(32, 2)
    def forward(self, x):
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h)
model = Model()
opt = torch.optim.SGD(model.head.parameters(), lr=0.1)
for step in range(60):
    pick = torch.randint(0, 256, (32,))
    loss = F.cross_entropy(model(x[pick]), y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
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
    _case("LSTM sentiment with packing", """
lengths = torch.randint(3, 10, (200,))
tokens = torch.randint(1, 20, (200, 10))
labels = (tokens[:, 0] > 10).float()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(48, 1)
    def forward(self, x, n):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), n, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.out(self.drop(torch.cat([h[0], h[1]], 1))).squeeze(1)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(6):
    net.train()
    for i in range(0, 160, 32):
        loss = F.binary_cross_entropy_with_logits(net(tokens[i:i + 32], lengths[i:i + 32]), labels[i:i + 32])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        F.binary_cross_entropy_with_logits(net(tokens[160:], lengths[160:]), labels[160:])
"""),
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
    _case("mixture of experts", """
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)])
        self.out = nn.Linear(8, 4)
    def forward(self, x):
        w = F.softmax(self.gate(x), -1)
        top = w.topk(2, -1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            hit = (top.indices == i).any(-1)
            if hit.any():
                y[hit] = y[hit] + w[hit, i:i + 1] * expert(x[hit])
        return self.out(y + x)
x = torch.randn(400, 8)
y = (x @ torch.randn(8, 4)).argmax(1)
model = MoE()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(60):
    pick = torch.randint(0, 400, (40,))
    loss = F.cross_entropy(model(x[pick]), y[pick])
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
    _case("small noisy batches to the end", """
x = torch.randn(200, 6)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(200):
    pick = torch.randint(0, 200, (4,))
    loss = F.cross_entropy(model(x[pick]), y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("overfitting one batch on purpose", """
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(80):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("LoRA", """
class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        nn.init.zeros_(self.b.weight)
    def forward(self, x):
        return self.base(x) + self.b(self.a(x))
model = nn.Sequential(Lora(nn.Linear(32, 32)), nn.ReLU(), Lora(nn.Linear(32, 32)), nn.ReLU(), nn.Linear(32, 3))
x = torch.randn(300, 32)
y = x[:, :3].argmax(1)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
for step in range(60):
    pick = torch.randint(0, 300, (32,))
    loss = F.cross_entropy(model(x[pick]), y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
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
    _case("autoencoder", """
x = torch.randn(300, 4) @ torch.randn(4, 20)
model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(60):
    loss = F.mse_loss(model(x), x)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("LBFGS", """
x = torch.linspace(-1, 1, 60)[:, None]
y = torch.sin(3 * x)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.LBFGS(model.parameters(), max_iter=5)
for step in range(15):
    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss
    opt.step(closure)
"""),
    _case("physics-informed network", """
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(60):
    t = (torch.rand(64, 1) * 2).requires_grad_()
    u = model(t)
    du, = torch.autograd.grad(u.sum(), t, create_graph=True)
    start = model(torch.zeros(1, 1))
    loss = ((du + u) ** 2).mean() + ((start - 1) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("warm-up, cosine and two groups of parameters", """
x = torch.randn(400, 16)
y = (x @ torch.randn(16, 5)).argmax(1)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5))
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() < 2]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=4e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 10) * 0.5 * (1 + math.cos(math.pi * s / 80)))
for step in range(80):
    pick = torch.randint(0, 400, (40,))
    loss = F.cross_entropy(model(x[pick]), y[pick])
    opt.zero_grad(set_to_none=False)
    loss.backward()
    opt.step()
    schedule.step()
"""),
    _case("multi-task with two heads and one backward each", """
x = torch.randn(300, 10)
y, z = (x[:, 0] > 0).long(), x[:, 1:2] * 2
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(10, 32), nn.Linear(32, 2), nn.Linear(32, 1)
    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.a(h), self.b(h)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(80):
    pick = torch.randint(0, 300, (32,))
    first, second = model(x[pick])
    opt.zero_grad()
    F.cross_entropy(first, y[pick]).backward(retain_graph=True)
    F.mse_loss(second, z[pick]).backward()
    opt.step()
"""),
    _case("segmentation with few positive pixels", """
x = torch.randn(96, 1, 12, 12)
mask = (x > 1.6).float()
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1))
criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(10.0))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(8):
    for a, b in DataLoader(TensorDataset(x, mask), batch_size=16, shuffle=True):
        loss = criterion(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""),
]  # fmt: skip
