"""Trainings without a fault, as different people write them: no two in the same style."""

from __future__ import annotations

from outside.faults.case import Healthy

TRAININGS = [
    Healthy("stranger: mini Lightning", """
import torch
from torch import nn, optim
class Callback:
    def on_epoch_end(self, module, epoch): print(epoch, module.logged)
class Module(nn.Module):
    logged: dict
    def log(self, key, value): self.logged[key] = float(value)
class LitNet(Module):
    def __init__(self):
        super().__init__()
        self.logged = {}
        self.net = nn.Sequential(nn.Linear(6, 40), nn.SiLU(), nn.BatchNorm1d(40), nn.Linear(40, 3))
    def forward(self, x): return self.net(x)
    def training_step(self, batch, i):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))
    def configure_optimizers(self):
        opt = optim.AdamW(self.parameters(), lr=5e-3)
        return opt, optim.lr_scheduler.ExponentialLR(opt, 0.9)
def fit(module, train, val, epochs, callbacks):
    opt, sched = module.configure_optimizers()
    for epoch in range(epochs):
        module.train()
        for i, batch in enumerate(train):
            def closure():
                opt.zero_grad()
                loss = module.training_step(batch, i)
                loss.backward()
                return loss
            opt.step(closure)
        sched.step()
        module.eval()
        with torch.no_grad():
            for batch in val: module.validation_step(batch)
        for c in callbacks: c.on_epoch_end(module, epoch)
torch.manual_seed(0)
x = torch.randn(360, 6); y = x[:, :3].argmax(1)
batches = [(x[i:i + 30], y[i:i + 30]) for i in range(0, 360, 30)]
fit(LitNet(), batches[:10], batches[10:], 6, [Callback()])
"""),
    Healthy("stranger: masked language model", """
import torch
from torch import nn
torch.manual_seed(1)
V, MASK, PAD, T = 24, 1, 0, 14
emb = nn.Embedding(V, 32, padding_idx=PAD)
pos = nn.Parameter(torch.randn(T, 32) * 0.02)
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
head = nn.Linear(32, V)
params = [*emb.parameters(), pos, *body.parameters(), *head.parameters()]
opt = torch.optim.AdamW(params, lr=2e-3)
def sample(n):
    start = torch.randint(2, V, (n, 1))
    seq = 2 + (start - 2 + 3 * torch.arange(T)) % (V - 2)
    length = torch.randint(8, T + 1, (n, 1))
    return torch.where(torch.arange(T) < length, seq, torch.full_like(seq, PAD))
for step in range(70):
    clean = sample(24)
    chosen = (torch.rand(clean.shape) < 0.25) & (clean != PAD)
    noisy = clean.masked_fill(chosen, MASK)
    labels = clean.masked_fill(~chosen, -100)
    h = body(emb(noisy) + pos, src_key_padding_mask=noisy == PAD)
    loss = nn.functional.cross_entropy(head(h).transpose(1, 2), labels)
    opt.zero_grad(set_to_none=True); loss.backward(); nn.utils.clip_grad_norm_(params, 1.0); opt.step()
print(loss.item())
"""),
    Healthy("stranger: encoder and decoder", """
import torch, torch.nn as nn
torch.manual_seed(3)
class Seq2Seq(nn.Module):
    def __init__(self, v=12, d=32):
        super().__init__()
        self.src, self.tgt = nn.Embedding(v, d), nn.Embedding(v, d)
        self.pe = nn.Parameter(0.1 * torch.randn(1, 16, d))
        self.core = nn.Transformer(d, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(d, v)
    def forward(self, s, t):
        mask = nn.Transformer.generate_square_subsequent_mask(t.shape[1])
        h = self.core(self.src(s) + self.pe[:, :s.shape[1]], self.tgt(t) + self.pe[:, :t.shape[1]], tgt_mask=mask)
        return self.out(h)
net = Seq2Seq()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
lossf = nn.CrossEntropyLoss()
for it in range(80):
    s = torch.randint(2, 12, (20, 8))
    full = torch.cat([torch.ones(20, 1, dtype=torch.long), s.flip(1)], 1)
    logits = net(s, full[:, :-1])
    loss = lossf(logits.reshape(-1, 12), full[:, 1:].reshape(-1))
    opt.zero_grad(); loss.backward(); opt.step()
print(float(loss))
"""),
    Healthy("stranger: time-major GRU", """
import torch
from torch import nn
torch.manual_seed(4)
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 20, bidirectional=True)
        self.fc = nn.Linear(40, 2)
    def forward(self, seq):            # seq is (time, batch, features), as torchtext gave it
        states, _ = self.gru(seq)
        return self.fc(states)
m = Tagger()
o = torch.optim.NAdam(m.parameters(), lr=4e-3)
for k in range(60):
    seq = torch.randn(11, 16, 3)
    tag = (seq.cumsum(0)[..., 0] > 0).long()
    loss = nn.functional.cross_entropy(m(seq).flatten(0, 1), tag.flatten())
    o.zero_grad(); loss.backward(); o.step()
print(loss)
"""),
    Healthy("stranger: PPO with minibatches", """
import torch
from torch import nn
from torch.distributions import Categorical
torch.manual_seed(5)
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, 3), nn.Linear(32, 1)
    def forward(self, s):
        h = self.trunk(s)
        return self.pi(h), self.v(h).squeeze(-1)
ac = ActorCritic()
opt = torch.optim.Adam(ac.parameters(), lr=3e-3, eps=1e-5)
for rollout in range(8):
    s = torch.randn(96, 4)
    with torch.no_grad():
        logits, value = ac(s)
        dist = Categorical(logits=logits)
        a = dist.sample(); logp_old = dist.log_prob(a)
        reward = (a == s[:, :3].argmax(1)).float()
        adv = reward - value
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    for epoch in range(3):
        for mb in torch.randperm(96).split(32):
            logits, v = ac(s[mb])
            dist = Categorical(logits=logits)
            ratio = (dist.log_prob(a[mb]) - logp_old[mb]).exp()
            policy = -torch.min(ratio * adv[mb], ratio.clamp(0.8, 1.2) * adv[mb]).mean()
            critic = 0.5 * (v - reward[mb]).pow(2).mean()
            loss = policy + critic - 0.01 * dist.entropy().mean()
            opt.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(ac.parameters(), 0.5); opt.step()
"""),
    Healthy("stranger: two networks in one loop", """
import torch as t
t.manual_seed(6)
gen = t.nn.Sequential(t.nn.Linear(8, 32), t.nn.BatchNorm1d(32), t.nn.ReLU(), t.nn.Linear(32, 2), t.nn.Tanh())
dis = t.nn.Sequential(t.nn.Linear(2, 32), t.nn.LeakyReLU(0.2), t.nn.Dropout(0.3), t.nn.Linear(32, 1), t.nn.Sigmoid())
og, od = (t.optim.Adam(n.parameters(), 2e-4, betas=(0.5, 0.999)) for n in (gen, dis))
bce = t.nn.BCELoss()
def real_samples(n):
    a = t.rand(n) * 6.28
    return t.stack([a.cos(), a.sin()], 1) * 0.7
for it in range(70):
    x = real_samples(64)
    ones, zeros = t.full((64, 1), 0.9), t.zeros(64, 1)
    od.zero_grad()
    d_loss = bce(dis(x), ones)
    d_loss.backward()
    fake = gen(t.randn(64, 8))
    f_loss = bce(dis(fake.detach()), zeros)
    f_loss.backward()
    od.step()
    og.zero_grad()
    g_loss = bce(dis(fake), ones)
    g_loss.backward()
    og.step()
"""),
    Healthy("stranger: graph attention in plain tensors", """
import torch, torch.nn.functional as F
torch.manual_seed(7)
n = 60
label = torch.randint(0, 3, (n,))
same = (label[:, None] == label[None]).float()
adj = ((torch.rand(n, n) < 0.05 + 0.25 * same).float() + torch.eye(n)).clamp(max=1)
feat = torch.randn(n, 10) + F.one_hot(label, 3).float() @ torch.randn(3, 10)
class GAT(torch.nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.w = torch.nn.Linear(i, o, bias=False)
        self.a = torch.nn.Parameter(torch.randn(2, o) * 0.1)
    def forward(self, x, adj):
        h = self.w(x)
        e = F.leaky_relu((h @ self.a[0])[:, None] + (h @ self.a[1])[None], 0.2)
        att = e.masked_fill(adj == 0, -1e9).softmax(dim=1)
        return att @ h
l1, l2 = GAT(10, 16), GAT(16, 3)
opt = torch.optim.Adam([*l1.parameters(), *l2.parameters()], lr=1e-2, weight_decay=5e-4)
train = torch.rand(n) < 0.6
for epoch in range(60):
    out = l2(F.elu(l1(feat, adj)), adj)
    loss = F.cross_entropy(out[train], label[train])
    opt.zero_grad(); loss.backward(); opt.step()
print((out[~train].argmax(1) == label[~train]).float().mean())
"""),
    Healthy("stranger: student and teacher with frozen parts", """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(8)
x = torch.randn(300, 12); y = (x[:, 0] * x[:, 1] > 0).long()
teacher = nn.Sequential(nn.Linear(12, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 2))
opt = torch.optim.Adam(teacher.parameters(), 5e-3)
for i in range(60):
    b = torch.randint(0, 300, (60,))
    loss = F.cross_entropy(teacher(x[b]), y[b]); opt.zero_grad(); loss.backward(); opt.step()
teacher.eval().requires_grad_(False)
class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 24)
        self.top = nn.Linear(24, 2)
        self.stem.weight.requires_grad_(True)
    def forward(self, x): return self.top(F.relu(self.stem(x)))
s = Student()
opt = torch.optim.SGD(s.parameters(), lr=0.1, momentum=0.9, nesterov=True)
T = 3.0
for i in range(60):
    b = torch.randint(0, 300, (60,))
    with torch.no_grad():
        soft = F.softmax(teacher(x[b]) / T, dim=1)
    z = s(x[b])
    loss = F.kl_div(F.log_softmax(z / T, dim=1), soft, reduction="batchmean") * T * T + 0.3 * F.cross_entropy(z, y[b])
    opt.zero_grad(); loss.backward(); opt.step()
"""),
    Healthy("stranger: linear regression by hand", """
import torch
torch.manual_seed(9)
class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.zeros(3, 1))
    def forward(self, X):
        return X @ self.theta
X = torch.cat([torch.ones(200, 1), torch.randn(200, 2)], 1)
Y = X @ torch.tensor([[1.0], [2.0], [-3.0]]) + 0.1 * torch.randn(200, 1)
model = Linear()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(60):
    residual = model(X) - Y
    cost = residual.pow(2).sum() / (2 * len(X))
    sgd.zero_grad(); cost.backward(); sgd.step()
print(model.theta.detach().flatten())
"""),
    Healthy("stranger: resumed from a checkpoint", """
import torch, os
from torch import nn
torch.manual_seed(10)
x = torch.randn(256, 10); y = (x.sum(1) > 0).float()
def make():
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    return net, torch.optim.Adam(net.parameters(), 3e-3)
def run(net, opt, steps):
    net.train()
    for _ in range(steps):
        i = torch.randint(0, 256, (32,))
        loss = nn.functional.binary_cross_entropy_with_logits(net(x[i]), y[i])
        opt.zero_grad(); loss.backward(); opt.step()
    return loss.item()
net, opt = make()
print(run(net, opt, 30))
torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, "ckpt.pt")
net, opt = make()
state = torch.load("ckpt.pt")
net.load_state_dict(state["net"]); opt.load_state_dict(state["opt"])
print(run(net, opt, 30))
"""),
    Healthy("stranger: hypernetwork and functional call", """
import torch
from torch import nn
from torch.func import functional_call
torch.manual_seed(11)
target = nn.Linear(4, 1)
hyper = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 5))
nn.init.normal_(hyper[2].weight, std=0.05)
opt = torch.optim.Adam(hyper.parameters(), lr=5e-3)
for step in range(70):
    task = torch.randn(2)
    x = torch.randn(40, 4)
    y = x[:, :1] * task[0] + x[:, 1:2] * task[1]
    flat = hyper(task)
    out = functional_call(target, {"weight": flat[:4].view(1, 4), "bias": flat[4:]}, (x,))
    loss = nn.functional.mse_loss(out, y)
    opt.zero_grad(); loss.backward(); opt.step()
"""),
]  # fmt: skip
