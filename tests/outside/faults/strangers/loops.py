"""Loops, and parameters that are not trained: scripts as people post them with a question, and the mistake in each."""

from __future__ import annotations

from outside.faults.case import Pair

STUCK = ("loss_not_decreasing", "loss_at_chance")

OPT_STALE_MODEL = """import torch
from torch import nn

torch.manual_seed(0)


def build(width):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))


model = build(16)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
# wider works better
model = build(64); optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
X = torch.randn(500, 6)
Y = X[:, :1] * X[:, 1:2]
for epoch in range(10):
    for i in range(0, 500, 50):
        loss = ((model(X[i:i + 50]) - Y[i:i + 50]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
"""

LOOP_ZERO_GRAD_MISSING = """import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(1)
d = load_digits()
X, Y = torch.tensor(d.images / 16., dtype=torch.float32).unsqueeze(1), torch.tensor(d.target)


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(1, 16, 3)
        self.f1 = nn.Linear(16 * 9, 32)
        self.f2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c(x)), 2)
        return self.f2(F.relu(self.f1(x.view(-1, 16 * 9))))


def train(model, opt):
    model.train()
    for i in range(0, 1700, 50):
        opt.zero_grad()
        out = model(X[i:i + 50])
        loss = F.cross_entropy(out, Y[i:i + 50])
        loss.backward()
        opt.step()
    return loss.item()


net = LeNet()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for e in range(4):
    print(e, train(net, opt))
"""

LOOP_ACCUM_NEVER_STEPS = """import torch
from torch import nn

torch.manual_seed(3)
X = torch.randn(640, 10)
Y = X.pow(2).sum(1, keepdim=True) / 10
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
accumulation_steps = 4
for epoch in range(10):
    for i in range(0, 640, 40):
        j = i // 40
        loss = nn.functional.mse_loss(model(X[i:i + 40]), Y[i:i + 40]) / accumulation_steps
        loss.backward()
        if (j + 1) % accumulation_steps == 0:
            opt.step()
            opt.zero_grad()
    print(epoch, loss.item())
"""

LOOP_ITEM_TENSOR = """import torch
import torch.nn as nn

torch.manual_seed(4)
x = torch.randn(300, 4)
y = (x[:, 0] * x[:, 1] > 0).float()
model = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1))
bce = nn.BCEWithLogitsLoss()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for ep in range(12):
    total = 0
    for i in range(0, 300, 30):
        out = model(x[i:i + 30]).squeeze()
        losses = [bce(out, y[i:i + 30])]
        loss = torch.stack(losses).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    print(ep, total)
"""

LOOP_REINFORCE_SIGN = """# policy gradient on a contextual bandit
import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
opt = torch.optim.Adam(policy.parameters(), lr=0.01)
for it in range(200):
    s = torch.randn(64, 4)
    dist = Categorical(logits=policy(s))
    a = dist.sample()
    r = (a == s[:, :3].argmax(1)).float()
    adv = r - r.mean()
    loss = -(dist.log_prob(a) * adv).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 50 == 0:
        print(it, r.mean().item())
"""

PAR_PYTHON_LIST = """import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(0)
d = load_digits()
X, Y = torch.tensor(d.data / 16., dtype=torch.float32), torch.tensor(d.target)


class DeepNet(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(a, b) for a, b in zip(widths, widths[1:])])
        self.out = nn.Linear(widths[-1], 10)

    def forward(self, x):
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x)


net = DeepNet([64, 32, 32, 32])
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for ep in range(5):
    for i in range(0, 1600, 40):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(X[i:i + 40]), Y[i:i + 40])
        loss.backward()
        opt.step()
    print(ep, loss.item())
"""

PAR_HEAD_NOT_IN_OPTIMIZER = """import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(0)
d = load_digits()
X, Y = torch.tensor(d.images / 16., dtype=torch.float32).unsqueeze(1), torch.tensor(d.target)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


net = Detector()
params = [p for n, p in net.named_parameters() if True]
opt = torch.optim.SGD(params, lr=0.02, momentum=0.9)
for ep in range(3):
    for i in range(0, 1600, 40):
        opt.zero_grad()
        nn.functional.cross_entropy(net(X[i:i + 40]), Y[i:i + 40]).backward()
        opt.step()
"""

PAR_DETACH_ENCODER = """import torch
import torch.nn as nn

torch.manual_seed(0)


class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 6))
        self.dec = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 30))

    def forward(self, x):
        z = self.enc(x)
        return self.dec(z)


basis = torch.randn(6, 30)
ae = AE()
opt = torch.optim.Adam(ae.parameters(), lr=2e-3)
for it in range(150):
    x = torch.randn(64, 6) @ basis / 6 ** 0.5
    rec = ae(x)
    loss = ((rec - x) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 50 == 0:
        print(it, loss.item())
"""

PAIRS = [
    Pair(
        "question: model made again after its optimizer",
        "TrainCheck",
        "learning rate and optimizer",
        OPT_STALE_MODEL,
        (("model = build(64); optimizer = torch.optim.Adam(model.parameters(), lr=0.01)\n", "model = build(64)\n"),),
        "optimizer_stale",
        "optimizer = torch.optim",
        (*STUCK, "optimizer_incomplete"),
        (),
    ),
    Pair(
        "question: no zero_grad",
        "StackOverflow",
        "training loop",
        LOOP_ZERO_GRAD_MISSING,
        (("        opt.zero_grad()\n", ""),),
        "gradients_not_reset",
        "loss.backward()",
        ("loss_spike", *STUCK),
        (),
    ),
    Pair(
        "question: a remainder that never comes",
        "PyTorch forum",
        "training loop",
        LOOP_ACCUM_NEVER_STEPS,
        (
            (
                "        if (j + 1) % accumulation_steps == 0:\n",
                "        if j % accumulation_steps == accumulation_steps:\n",
            ),
        ),
        "step_missing",
        "loss.backward()",
        (*STUCK, "unchanged"),
        (),
    ),
    Pair(
        "question: a loss made of numbers",
        "StackOverflow",
        "training loop",
        LOOP_ITEM_TENSOR,
        (
            (
                "        loss = torch.stack(losses).sum()\n",
                "        loss = torch.tensor([l.item() for l in losses], requires_grad=True).sum()\n",
            ),
        ),
        "graph_detached",
        "torch.tensor([l.item()",
        (*STUCK, "unchanged"),
        (),
    ),
    Pair(
        "question: policy gradient without its sign",
        "PyTorch forum",
        "training loop",
        LOOP_REINFORCE_SIGN,
        (("    loss = -(dist.log_prob(a) * adv).mean()\n", "    loss = (dist.log_prob(a) * adv).mean()\n"),),
        "loss_negated",
        "dist.log_prob(a) * adv",
        STUCK,
        (),
    ),
    Pair(
        "question: layers in a list",
        "StackOverflow",
        "parameters not trained",
        PAR_PYTHON_LIST,
        (
            (
                "        self.hidden = nn.ModuleList([nn.Linear(a, b) for a, b in zip(widths, widths[1:])])\n",
                "        self.hidden = [nn.Linear(a, b) for a, b in zip(widths, widths[1:])]\n",
            ),
        ),
        "parameters_unregistered",
        "opt = torch.optim",
        STUCK,
        (),
    ),
    Pair(
        "question: optimizer without the head",
        "TrainCheck",
        "parameters not trained",
        PAR_HEAD_NOT_IN_OPTIMIZER,
        (
            (
                "params = [p for n, p in net.named_parameters() if True]\n",
                'params = [p for n, p in net.named_parameters() if "backbone" in n]\n',
            ),
        ),
        "optimizer_incomplete",
        "opt = torch.optim",
        ("unchanged",),
        ("head",),
    ),
    Pair(
        "question: encoder cut off",
        "PyTorch forum",
        "parameters not trained",
        PAR_DETACH_ENCODER,
        (("        z = self.enc(x)\n", "        z = self.enc(x)\n        z = z.detach()\n"),),
        "graph_detached",
        "z.detach()",
        ("unchanged",),
        ("enc",),
    ),
]
