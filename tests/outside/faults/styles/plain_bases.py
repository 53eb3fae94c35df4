"""Correct scripts in plain PyTorch: closures, dataclasses, functions over NumPy, trainer classes."""

from __future__ import annotations

WINE = '''"""Classify wines. Everything lives in functions; main() is called at the end."""
import argparse
import numpy as np
import torch as th
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler


def get_data(seed):
    X, y = load_wine(return_X_y=True)
    Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.25, random_state=seed, stratify=y)
    scaler = StandardScaler().fit(Xtr)
    Xtr, Xte = scaler.transform(Xtr), scaler.transform(Xte)
    return Xtr.astype(np.float32), ytr, Xte.astype(np.float32), yte


def build(n_in, n_out, width):
    return th.nn.Sequential(
        th.nn.Linear(n_in, width),
        th.nn.ReLU(),
        th.nn.Linear(width, width),
        th.nn.ReLU(),
        th.nn.Linear(width, n_out),
    )


def minibatches(X, y, size, rng):
    order = rng.permutation(len(X))
    for lo in range(0, len(X) - size + 1, size):
        idx = order[lo:lo + size]
        yield th.from_numpy(X[idx]), th.from_numpy(y[idx])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--epochs", type=int, default=20)
    args = p.parse_args([])
    th.manual_seed(1)
    rng = np.random.default_rng(1)
    Xtr, ytr, Xte, yte = get_data(1)
    net = build(Xtr.shape[1], 3, 24)
    loss_fn = th.nn.CrossEntropyLoss()
    opt = th.optim.SGD(net.parameters(), args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        for xb, yb in minibatches(Xtr, ytr, 16, rng):
            scores = net(xb)
            err = loss_fn(scores, yb)
            opt.zero_grad()
            err.backward()
            opt.step()
        with th.no_grad():
            acc = (net(th.from_numpy(Xte)).argmax(-1).numpy() == yte).mean()
    print("accuracy", acc)


if __name__ == "__main__":
    main()
'''

HOUSES = """import torch
from dataclasses import dataclass
from torch import nn, optim
from sklearn.datasets import load_diabetes

@dataclass
class Config:
    hidden: int = 48
    lr: float = 2e-3
    batch: int = 32
    epochs: int = 14
    seed: int = 3

cfg = Config()
torch.manual_seed(cfg.seed)
raw = load_diabetes()
X = torch.as_tensor(raw.data, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
y = torch.as_tensor(raw.target, dtype=torch.float32)
y = (y - y.mean()) / y.std()
y = y.reshape(-1, 1)
n_train = 352

class Regressor(nn.Module):
    def __init__(self, d_in, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d_in, hidden), nn.LeakyReLU(0.1), nn.Dropout(0.1), nn.Linear(hidden, hidden), nn.LeakyReLU(0.1))
        self.readout = nn.Linear(hidden, 1)

    def forward(self, inp):
        return self.readout(self.body(inp))

class Trainer:
    def __init__(self, net, cfg):
        self.net, self.cfg = net, cfg
        self.opt = optim.AdamW(net.parameters(), lr=cfg.lr, weight_decay=1e-2)
        self.history = []

    def loss(self, xb, yb):
        pred = self.net(xb)
        return ((pred - yb) ** 2).mean()

    def fit(self, X, y):
        for _ in range(self.cfg.epochs):
            self.net.train()
            for chunk in torch.randperm(len(X)).split(self.cfg.batch):
                self.opt.zero_grad(set_to_none=True)
                value = self.loss(X[chunk], y[chunk])
                value.backward()
                self.opt.step()
                self.history.append(value.item())
            self.validate()

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        return self.loss(X[n_train:], y[n_train:]).item()

trainer = Trainer(Regressor(X.shape[1], cfg.hidden), cfg)
trainer.fit(X[:n_train], y[:n_train])
print(trainer.validate())
"""

BREAST = """import torch, torch.nn as nn, torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch.utils.data import Dataset, DataLoader, random_split

class Cells(Dataset):
    def __init__(self):
        d = load_breast_cancer()
        feats = torch.tensor(d.data).float()
        self.x = (feats - feats.mean(dim=0)) / (feats.std(dim=0) + 1e-8)
        self.y = torch.tensor(d.target).float()
    def __len__(self): return len(self.y)
    def __getitem__(self, i): return {"features": self.x[i], "label": self.y[i]}

torch.manual_seed(7)
data = Cells()
train, val = random_split(data, [469, 100])
train_dl = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
val_dl = DataLoader(val, batch_size=100)

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(30, 32), nn.Linear(32, 16), nn.Linear(16, 1)
        self.bn = nn.BatchNorm1d(32)
    def forward(self, batch):
        h = F.relu(self.bn(self.l1(batch["features"])))
        h = F.relu(self.l2(h))
        return torch.sigmoid(self.l3(h)).squeeze(-1)

net = MLP()
crit = nn.BCELoss()
optimiser = torch.optim.Adam([{"params": net.l1.parameters()}, {"params": net.bn.parameters()},
                              {"params": net.l2.parameters(), "lr": 2e-3}, {"params": net.l3.parameters()}], lr=4e-3)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, patience=2)
for ep in range(6):
    net.train()
    running = 0.0
    for batch in train_dl:
        out = net(batch)
        J = crit(out, batch["label"])
        optimiser.zero_grad()
        J.backward()
        optimiser.step()
        running += J.item()
    net.eval()
    with torch.inference_mode():
        vl = sum(crit(net(b), b["label"]).item() for b in val_dl)
    sched.step(vl)
    print(f"{ep}: {running / len(train_dl):.3f} {vl:.3f}")
"""

ACCUMULATE = """import contextlib, math
import torch
from torch import nn

gen = torch.Generator().manual_seed(11)
torch.manual_seed(11)
N, D, C = 640, 16, 5
W = torch.randn(D, C, generator=gen)
data = torch.randn(N, D, generator=gen)
target = (data @ W + 0.3 * torch.randn(N, C, generator=gen)).argmax(dim=1)
micro, accumulate, max_norm = 20, 4, 5.0
network = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, C))
decay = [p for p in network.parameters() if p.ndim > 1]
rest = [p for p in network.parameters() if p.ndim <= 1]
optimizer = torch.optim.SGD([dict(params=decay, weight_decay=1e-4), dict(params=rest, weight_decay=0.0)], lr=0.3, momentum=0.9)
total = 40
def schedule(step):
    return min(1.0, (step + 1) / 5) * 0.5 * (1 + math.cos(math.pi * step / total))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
autocast = torch.autocast("cpu", dtype=torch.bfloat16)
for update in range(total):
    for _ in range(accumulate):
        sel = torch.randint(0, N, (micro,), generator=gen)
        with autocast:
            logit = network(data[sel])
            loss = nn.functional.cross_entropy(logit, target[sel], label_smoothing=0.05) / accumulate
        loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
print(float(loss) * accumulate)
"""

FINETUNE = """import copy
import torch
from torch import nn

torch.manual_seed(5)
def make_task(k, seed):
    g = torch.Generator().manual_seed(seed)
    c = torch.randn(k, 24, generator=g) * 1.4
    lab = torch.randint(0, k, (600,), generator=g)
    return c[lab] + torch.randn(600, 24, generator=g), lab

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.AvgPool1d(2))
        self.proj = nn.Linear(8 * 12, 32)
    def forward(self, x):
        return torch.relu(self.proj(self.conv(x.unsqueeze(1)).flatten(1)))

class Net(nn.Module):
    def __init__(self, encoder, classes):
        super().__init__()
        self.encoder = encoder
        self.fc = nn.Linear(32, classes)
    def forward(self, x):
        return self.fc(self.encoder(x))

def fit(model, params, x, t, steps, lr):
    opt = torch.optim.Adam(params, lr=lr)
    for i in range(steps):
        j = torch.randint(0, len(x), (50,))
        loss = nn.functional.cross_entropy(model(x[j]), t[j])
        opt.zero_grad(); loss.backward(); opt.step()
    return loss.item()

x, t = make_task(6, 0)
pre = Net(Encoder(), 6)
print("pretrain", fit(pre, pre.parameters(), x, t, 40, 3e-3))
x2, t2 = make_task(3, 9)
tuned = Net(copy.deepcopy(pre.encoder), 3)
for p in tuned.encoder.parameters():
    p.requires_grad = False
tuned.encoder.eval()
print("finetune", fit(tuned, tuned.fc.parameters(), x2, t2, 40, 1e-2))
"""
