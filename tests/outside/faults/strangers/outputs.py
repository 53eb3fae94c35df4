"""Outputs and losses that do not fit: scripts as people post them with a question, and the mistake in each."""

from __future__ import annotations

from outside.faults.case import Pair

STUCK = ("loss_not_decreasing", "loss_at_chance")

ACT_RELU_OUT_REGRESSION = """import torch
from torch import nn

torch.manual_seed(7)
X = torch.randn(600, 5)
true_w = torch.tensor([1.5, -2.0, 0.7, 0.0, 3.0])
Y = (X @ true_w - 1.0).unsqueeze(1) + 0.05 * torch.randn(600, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(5, 40)
        self.l2 = nn.Linear(40, 20)
        self.out = nn.Linear(20, 1)

    def forward(self, x):
        x = torch.relu(self.l1(x))
        x = torch.relu(self.l2(x))
        return self.out(x)


net = Net()
crit = nn.MSELoss()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for epoch in range(8):
    perm = torch.randperm(600)
    for i in range(0, 600, 40):
        b = perm[i:i + 40]
        opt.zero_grad()
        l = crit(net(X[b]), Y[b])
        l.backward()
        opt.step()
    print(epoch, l.item())
"""

ACT_SIGMOID_PRICES = """import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

np.random.seed(3)
torch.manual_seed(3)
rooms = np.random.randint(1, 8, (800, 1)).astype(np.float32)
area = np.random.uniform(0.3, 2.5, (800, 1)).astype(np.float32)
price = 12.0 * area + 3.0 * rooms + np.random.randn(800, 1).astype(np.float32)
feats = np.hstack([(rooms - rooms.mean()) / rooms.std(), (area - area.mean()) / area.std()])
dl = DataLoader(TensorDataset(torch.tensor(feats), torch.tensor(price)), batch_size=32, shuffle=True)

model = nn.Sequential(
    nn.Linear(2, 32), nn.ReLU(),
    nn.Linear(32, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.MSELoss()
for ep in range(5):
    for xb, yb in dl:
        pred = model(xb)
        loss = loss_fn(pred, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(ep, float(loss))
"""

LOSS_BROADCAST = """import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
x = torch.linspace(-3, 3, 512).unsqueeze(1)
y = torch.sin(x) + 0.1 * torch.randn(512, 1)
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optim = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(160):
    idx = torch.randint(0, 512, (64,))
    out = model(x[idx])
    loss = torch.mean((out - y[idx]) ** 2)
    optim.zero_grad()
    loss.backward()
    optim.step()
    if step % 40 == 0:
        print(step, loss.item())
"""

LOSS_REQUIRES_GRAD_ARGMAX = """import torch
import torch.nn as nn

torch.manual_seed(1)
data = torch.randn(400, 10)
labels = (data[:, 0] > 0).long() + (data[:, 1] > 0).long()


class Classifier(nn.Module):
    def __init__(self):
        super(Classifier, self).__init__()
        self.fc1 = nn.Linear(10, 30)
        self.fc2 = nn.Linear(30, 3)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


model = Classifier()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(10):
    for i in range(0, 400, 40):
        inputs, target = data[i:i + 40], labels[i:i + 40]
        optimizer.zero_grad()
        output = model(inputs)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
    print('epoch', epoch, 'loss', loss.item())
"""

LOSS_NLL_LOGITS = """import torch
from torch import nn, optim
import torch.nn.functional as F

torch.manual_seed(5)
centres = 2 * torch.randn(5, 16)


def batch(n):
    y = torch.randint(5, (n,))
    return centres[y] + torch.randn(n, 16), y


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 48)
        self.b = nn.Linear(48, 5)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = self.b(x)
        return F.log_softmax(x, dim=1)


m = MLP()
o = optim.SGD(m.parameters(), lr=0.05)
for it in range(150):
    x, y = batch(32)
    o.zero_grad()
    loss = F.nll_loss(m(x), y)
    loss.backward()
    o.step()
    if it % 30 == 0:
        print(it, loss.item())
"""

LOSS_KLDIV_PROBS = """# distil a small student from a teacher
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
teacher = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 4))
for p in teacher.parameters():
    p.data.mul_(2.0)
    p.requires_grad_(False)
teacher.eval()
student = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.Adam(student.parameters(), lr=5e-3)
T = 2.0
for i in range(150):
    x = torch.randn(64, 10)
    with torch.no_grad():
        t = F.softmax(teacher(x) / T, dim=-1)
    s = F.log_softmax(student(x) / T, dim=-1)
    loss = F.kl_div(s, t, reduction="batchmean") * T * T
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
"""

PAR_ONE_LAYER_THRICE = """import torch
from torch import nn
from sklearn.datasets import load_digits

torch.manual_seed(0)
d = load_digits()
X, Y = torch.tensor(d.data / 16., dtype=torch.float32), torch.tensor(d.target)


class Blocks(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.last(x)


net = Blocks()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for ep in range(3):
    order = torch.randperm(1600)
    for i in range(0, 1600, 40):
        b = order[i:i + 40]
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(X[b]), Y[b])
        loss.backward()
        opt.step()
    print(ep, loss.item())
"""

PAIRS = [
    Pair(
        "question: relu after the last layer of a regression",
        "StackOverflow",
        "output activation",
        ACT_RELU_OUT_REGRESSION,
        (("        return self.out(x)\n", "        return torch.relu(self.out(x))\n"),),
        "output_bounded",
        "torch.relu(self.out(x))",
        STUCK,
        ("out",),
    ),
    Pair(
        "question: sigmoid for prices",
        "StackOverflow",
        "output activation",
        ACT_SIGMOID_PRICES,
        (("    nn.Linear(32, 1),\n", "    nn.Linear(32, 1), nn.Sigmoid(),\n"),),
        "output_bounded",
        "nn.Sigmoid()",
        STUCK,
        ("2", "3"),
    ),
    Pair(
        "question: targets without their column, by hand",
        "StackOverflow",
        "loss",
        LOSS_BROADCAST,
        (("y = torch.sin(x) + 0.1 * torch.randn(512, 1)\n", "y = torch.sin(x).squeeze() + 0.1 * torch.randn(512)\n"),),
        "loss_broadcast",
        "(out - y[idx]) ** 2",
        STUCK,
        (),
    ),
    Pair(
        "question: argmax and requires_grad",
        "StackOverflow",
        "loss",
        LOSS_REQUIRES_GRAD_ARGMAX,
        (
            ("criterion = nn.CrossEntropyLoss()\n", "criterion = nn.MSELoss()\n"),
            (
                "        loss = criterion(output, target)\n",
                "        _, output = torch.max(output, 1)\n        loss = criterion(output.float(), target.float())\n        loss.requires_grad = True\n",
            ),
        ),
        "graph_detached",
        "loss = criterion(",
        STUCK,
        (),
    ),
    Pair(
        "question: nll_loss of logits",
        "PyTorch forum; DeepFD",
        "loss",
        LOSS_NLL_LOGITS,
        (("        return F.log_softmax(x, dim=1)\n", "        return x\n"),),
        "activation_loss_mismatch",
        "F.nll_loss(",
        STUCK,
        ("b",),
    ),
    Pair(
        "question: kl_div of probabilities",
        "PyTorch forum",
        "loss",
        LOSS_KLDIV_PROBS,
        (("    s = F.log_softmax(student(x) / T, dim=-1)\n", "    s = F.softmax(student(x) / T, dim=-1)\n"),),
        "activation_loss_mismatch",
        "F.kl_div(",
        STUCK,
        (),
    ),
    Pair(
        "question: one layer three times",
        "StackOverflow",
        "parameters not trained",
        PAR_ONE_LAYER_THRICE,
        (
            (
                "        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])\n",
                "        self.blocks = nn.ModuleList([nn.Linear(width, width)] * depth)\n",
            ),
        ),
        "layers_shared",
        "self.blocks = ",
        (),
        ("blocks",),
    ),
]
