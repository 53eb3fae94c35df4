"""Modes, batch normalisation, initialisation, half precision: scripts as people post them with a question, and the mistake in each."""

from __future__ import annotations

from outside.faults.case import Pair

STUCK = ("loss_not_decreasing", "loss_at_chance")

MODE_EVAL_NEVER_BACK = """import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(0)
d = load_digits()
X, Y = torch.tensor(d.images / 16., dtype=torch.float32).unsqueeze(1), torch.tensor(d.target)
Xt, Yt, Xv, Yv = X[:1400], Y[:1400], X[1400:], Y[1400:]
model = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.3), nn.Linear(12 * 16, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def validate():
    model.eval()
    with torch.no_grad():
        return (model(Xv).argmax(1) == Yv).float().mean().item()


model.train()
for epoch in range(5):
    model.train()
    for i in range(0, 1400, 40):
        loss = nn.functional.cross_entropy(model(Xt[i:i + 40]), Yt[i:i + 40])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, validate())
"""

MODE_VALIDATE_IN_TRAIN = """import torch
from torch import nn
from sklearn.datasets import load_digits

torch.manual_seed(0)
d = load_digits()
X, Y = torch.tensor(d.data / 16., dtype=torch.float32), torch.tensor(d.target)
net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(5):
    net.train()
    for i in range(0, 1400, 40):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(X[i:i + 40]), Y[i:i + 40])
        loss.backward()
        opt.step()
    net.eval()
    correct = 0
    with torch.no_grad():
        for i in range(1400, 1797, 40):
            correct += (net(X[i:i + 40]).argmax(1) == Y[i:i + 40]).sum().item()
    print("epoch %d acc %.3f" % (epoch, correct / 397))
"""

MODE_BN_BATCH_ONE = """import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
d = load_digits()
ds = TensorDataset(torch.tensor(d.images / 16., dtype=torch.float32).unsqueeze(1), torch.tensor(d.target))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.b1 = nn.BatchNorm2d(8)
        self.c2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.b2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 4, 10)

    def forward(self, x):
        x = F.relu(self.b1(self.c1(x)))
        x = F.relu(self.b2(self.c2(x)))
        return self.fc(x.flatten(1))


net = Net()
loader = DataLoader(ds, batch_size=32, shuffle=True)
opt = torch.optim.SGD(net.parameters(), lr=0.05)


def train(steps):
    while True:
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            steps -= 1
            if not steps:
                return loss.item()


print(train(150))
"""

INIT_ZEROS = """import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(0)
d = load_digits()
X, Y = torch.tensor(d.data / 16., dtype=torch.float32), torch.tensor(d.target)


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        nn.init.zeros_(m.bias)


net = nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 10))
net.apply(weights_init)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for ep in range(4):
    for i in range(0, 1600, 40):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(X[i:i + 40]), Y[i:i + 40])
        loss.backward()
        opt.step()
    print(ep, loss.item())
"""

HALF_ADAM_EPS = """import torch
import torch.nn as nn

torch.manual_seed(0)
dtype = torch.float32
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(dtype)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
w = torch.randn(16, 1)
for i in range(120):
    x = torch.randn(64, 16)
    y = x @ w
    out = model(x.to(dtype))
    loss = nn.functional.mse_loss(out, y.to(dtype))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 20 == 0:
        print(i, loss.item())
"""

SEQ_NO_CAUSAL_MASK = """import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
V, T, D = 20, 16, 32
trans = torch.softmax(2 * torch.randn(V, V), -1)


def sample(n):
    s = torch.randint(V, (n, 1))
    for _ in range(T):
        s = torch.cat([s, torch.multinomial(trans[s[:, -1]], 1)], 1)
    return s


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.pos = nn.Embedding(T, D)
        layer = nn.TransformerEncoderLayer(D, 4, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(D, V)

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        h = self.enc(h, mask=mask)
        return self.head(h)


lm = LM()
opt = torch.optim.AdamW(lm.parameters(), lr=3e-3)
for it in range(150):
    s = sample(32)
    logits = lm(s[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, V), s[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 30 == 0:
        print(it, loss.item())
"""

PAIRS = [
    Pair(
        "question: validation leaves evaluation mode on",
        "TrainCheck",
        "mode, dropout, batch norm",
        MODE_EVAL_NEVER_BACK,
        (("    model.train()\n", ""),),
        "trained_in_eval_mode",
        "loss = nn.functional.cross_entropy(model(",
        (),
        (),
    ),
    Pair(
        "question: validation without eval",
        "StackOverflow",
        "mode, dropout, batch norm",
        MODE_VALIDATE_IN_TRAIN,
        (("    net.eval()\n", ""),),
        "eval_in_train_mode",
        "correct += ",
        (),
        (),
    ),
    Pair(
        "question: batch normalisation of one image",
        "StackOverflow",
        "mode, dropout, batch norm",
        MODE_BN_BATCH_ONE,
        (
            (
                "loader = DataLoader(ds, batch_size=32, shuffle=True)\n",
                "loader = DataLoader(ds, batch_size=1, shuffle=True)\n",
            ),
        ),
        "batchnorm_cannot_estimate",
        "batch_size=1",
        ("loss_spike", *STUCK),
        ("b1", "b2"),
    ),
    Pair(
        "question: all weights zero",
        "StackOverflow; DeepFD",
        "initialisation",
        INIT_ZEROS,
        (("        nn.init.xavier_uniform_(m.weight)\n", "        nn.init.zeros_(m.weight)\n"),),
        "poor_initialisation",
        "nn.init.zeros_(m.weight)",
        STUCK,
        ("0", "2", "4"),
    ),
    Pair(
        "question: Adam in half precision",
        "PyTorch forum",
        "half precision",
        HALF_ADAM_EPS,
        (("dtype = torch.float32\n", "dtype = torch.float16\n"),),
        "eps_too_small",
        "torch.optim.Adam",
        ("nonfinite", "updates_lost"),
        (),
    ),
    Pair(
        "question: no causal mask",
        "StackOverflow",
        "attention and sequences",
        SEQ_NO_CAUSAL_MASK,
        (("        h = self.enc(h, mask=mask)\n", "        h = self.enc(h)\n"),),
        "attention_not_causal",
        "F.cross_entropy(logits",
        (),
        ("enc",),
    ),
]
