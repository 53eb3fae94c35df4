"""Data, rates and optimizers: scripts as people post them with a question, and the mistake in each."""

from __future__ import annotations

from outside.faults.case import Pair

STUCK = ("loss_not_decreasing", "loss_at_chance")

DATA_LABELS_SHUFFLED = """import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import TensorDataset, DataLoader

np.random.seed(11)
torch.manual_seed(11)
n = 3000
y = np.random.randint(0, 4, n)
x = np.random.randn(n, 8).astype('float32')
x[np.arange(n), y] += 3.0

# shuffle before splitting
idx = np.random.permutation(n)
x = x[idx]
y = y[idx]

train = TensorDataset(torch.from_numpy(x[:2500]), torch.from_numpy(y[:2500]))
loader = DataLoader(train, batch_size=50, shuffle=True)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for epoch in range(4):
    running = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
        running += loss.item()
    print(epoch, running / len(loader))
"""

DATA_UNSCALED_FEATURES = """import numpy as np
import torch
import torch.nn as nn

rng = np.random.RandomState(4)
torch.manual_seed(4)
n = 1000
salary = rng.uniform(20000, 90000, n)
age = rng.uniform(20, 70, n)
balance = rng.normal(5000, 20000, n)
X = np.stack([salary, age, balance], 1).astype(np.float32)
y = ((salary - 55000) / 20000 + (age - 45) / 15 + balance / 20000 > 0).astype(np.float32)
X = (X - X.mean(0)) / X.std(0)
X = torch.from_numpy(X)
y = torch.from_numpy(y).view(-1, 1)


class ANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.h1 = nn.Linear(3, 12)
        self.h2 = nn.Linear(12, 12)
        self.o = nn.Linear(12, 1)

    def forward(self, x):
        x = torch.sigmoid(self.h1(x))
        x = torch.sigmoid(self.h2(x))
        return self.o(x)


ann = ANN()
bce = nn.BCEWithLogitsLoss()
adam = torch.optim.Adam(ann.parameters(), lr=0.01)
for e in range(8):
    for k in range(0, n, 50):
        adam.zero_grad()
        out = ann(X[k:k + 50])
        loss = bce(out, y[k:k + 50])
        loss.backward()
        adam.step()
    print(e, loss.item())
"""

DATA_NAN_CSV = """import io
import numpy as np
import pandas as pd
import torch
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng(5)
rows = ["a,b,c,target"]
for i in range(500):
    a, b, c = rng.normal(size=3)
    t = 2 * a - b + 0.3 * c
    rows.append(f"{a:.3f},{'' if i == 333 else format(b, '.3f')},{c:.3f},{t:.3f}")
df = pd.read_csv(io.StringIO("\\n".join(rows))).fillna(0.0)
x = torch.tensor(df[["a", "b", "c"]].values, dtype=torch.float32)
y = torch.tensor(df[["target"]].values, dtype=torch.float32)
ds = torch.utils.data.TensorDataset(x, y)
dl = torch.utils.data.DataLoader(ds, batch_size=25, shuffle=True)
model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(6):
    for xb, yb in dl:
        loss = nn.functional.mse_loss(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
"""

DATA_ONE_CLASS = """import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader

torch.manual_seed(9)


class Reviews(Dataset):
    def __init__(self, n=800):
        self.x = torch.randn(n, 20)
        self.raw = ["Yes" if float(v[:5].sum()) > 0 else "No" for v in self.x]

    def __len__(self):
        return len(self.raw)

    def __getitem__(self, i):
        return self.x[i], torch.tensor(1.0 if self.raw[i] == "Yes" else 0.0)


loader = DataLoader(Reviews(), batch_size=32, shuffle=True)
clf = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(clf.parameters(), lr=1e-3)
lossf = nn.BCEWithLogitsLoss()
for ep in range(5):
    for x, t in loader:
        opt.zero_grad()
        loss = lossf(clf(x).squeeze(1), t)
        loss.backward()
        opt.step()
    print(ep, loss.item())
"""

DATA_DIVIDED_TWICE = """import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
d = load_digits()
img = (d.images / 16.0 * 255).astype(np.uint8)
imgs = img.astype(np.float32) / 255.0
imgs = imgs
X = torch.from_numpy(imgs).unsqueeze(1)
Y = torch.from_numpy(d.target).long()


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc = nn.Linear(24 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


net = ConvNet()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for ep in range(6):
    p = torch.randperm(len(X))
    for i in range(0, 1700, 68):
        b = p[i:i + 68]
        opt.zero_grad()
        loss = F.cross_entropy(net(X[b]), Y[b])
        loss.backward()
        opt.step()
    print(ep, loss.item())
"""

LR_ADAM_TOO_HIGH = """import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
y = torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
criterion = nn.CrossEntropyLoss()
for epoch in range(6):
    order = torch.randperm(len(x))
    for s in range(0, 1600, 64):
        b = order[s:s + 64]
        loss = criterion(model(x[b]), y[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
"""

LR_SCHED_PER_BATCH = """import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from sklearn.datasets import load_digits

torch.manual_seed(0)
d = load_digits()
X, Y = torch.tensor(d.data / 16., dtype=torch.float), torch.tensor(d.target)
dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=60, shuffle=True)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sched = StepLR(opt, step_size=2, gamma=0.5)
for epoch in range(6):
    for xb, yb in dl:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(xb), yb)
        loss.backward()
        opt.step()
    sched.step()
    print(epoch, loss.item(), sched.get_last_lr())
"""

LR_WEIGHT_DECAY_ONE = """import torch
from torch import nn
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler

torch.manual_seed(0)
w = load_wine()
X = torch.tensor(StandardScaler().fit_transform(w.data), dtype=torch.float32)
Y = torch.tensor(w.target)
net = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=1e-4)
for step in range(200):
    b = torch.randint(0, len(X), (32,))
    loss = nn.functional.cross_entropy(net(X[b]), Y[b])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(step, loss.item())
"""

PAIRS = [
    Pair(
        "question: labels of another order",
        "DeepCrime TCL",
        "data",
        DATA_LABELS_SHUFFLED,
        (("y = y[idx]\n", "y = y[np.random.permutation(n)]\n"),),
        "loss_at_chance",
        "y = y[np.random",
        STUCK,
        (),
    ),
    Pair(
        "question: raw features before sigmoids",
        "StackOverflow; DeepFD",
        "data",
        DATA_UNSCALED_FEATURES,
        (("X = (X - X.mean(0)) / X.std(0)\n", ""),),
        "inputs_not_normalised",
        "X = torch.from_numpy(X)",
        (*STUCK, "saturated"),
        (":input",),
    ),
    Pair(
        "question: an empty field in a table",
        "StackOverflow",
        "data",
        DATA_NAN_CSV,
        (
            (
                'df = pd.read_csv(io.StringIO("\\n".join(rows))).fillna(0.0)\n',
                'df = pd.read_csv(io.StringIO("\\n".join(rows)))\n',
            ),
        ),
        "nonfinite",
        "pd.read_csv",
        (),
        (),
    ),
    Pair(
        "question: an answer that is never met",
        "UMLAUT",
        "data",
        DATA_ONE_CLASS,
        (
            (
                '        return self.x[i], torch.tensor(1.0 if self.raw[i] == "Yes" else 0.0)\n',
                '        return self.x[i], torch.tensor(1.0 if self.raw[i] == "yes" else 0.0)\n',
            ),
        ),
        "labels_one_class",
        "self.raw[i] ==",
        STUCK,
        (),
    ),
    Pair(
        "question: divided by 255 twice",
        "UMLAUT",
        "data",
        DATA_DIVIDED_TWICE,
        (("imgs = imgs\n", "imgs = imgs / 255.0\n"),),
        "inputs_not_normalised",
        "imgs / 255.0",
        STUCK,
        (":input",),
    ),
    Pair(
        "question: Adam with 0.5",
        "DeepCrime HLR",
        "learning rate and optimizer",
        LR_ADAM_TOO_HIGH,
        (
            (
                "optimizer = torch.optim.Adam(model.parameters(), lr=0.002)\n",
                "optimizer = torch.optim.Adam(model.parameters(), lr=0.5)\n",
            ),
        ),
        "learning_rate_high",
        "lr=0.5",
        ("dead_units", "loss_spike", "loss_not_decreasing", "loss_at_chance"),
        (),
    ),
    Pair(
        "question: StepLR at every batch",
        "PyTorch forum",
        "learning rate and optimizer",
        LR_SCHED_PER_BATCH,
        (("    sched.step()\n", "        sched.step()\n"),),
        "scheduler_per_batch",
        "        sched.step()",
        ("learning_rate_zero", "loss_not_decreasing"),
        (),
    ),
    Pair(
        "question: weight decay of 1",
        "DeepCrime",
        "learning rate and optimizer",
        LR_WEIGHT_DECAY_ONE,
        (
            (
                "opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=1e-4)\n",
                "opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=1.0)\n",
            ),
        ),
        "weight_decay_high",
        "weight_decay=1.0",
        STUCK,
        (),
    ),
]
