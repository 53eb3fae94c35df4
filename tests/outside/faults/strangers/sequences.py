"""Attention and sequences: scripts as people post them with a question, and the mistake in each."""

from __future__ import annotations

from outside.faults.case import Pair

STUCK = ("loss_not_decreasing", "loss_at_chance")

SEQ_SOFTMAX_QUERIES = """import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.scale = dim ** -0.5

    def forward(self, x):
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) * self.scale
        w = F.softmax(scores, dim=-1)
        return torch.bmm(w, self.v(x))


class Clf(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 32)
        self.att = SelfAttention(32)
        self.out = nn.Linear(32, 3)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        return self.out(self.att(h).mean(1))


clf = Clf()
opt = torch.optim.Adam(clf.parameters(), lr=3e-3)
for i in range(150):
    y = torch.randint(3, (32,))
    x = torch.randn(32, 10, 4)
    x[torch.arange(32), torch.randint(10, (32,)), y] += 4
    loss = F.cross_entropy(clf(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 30 == 0:
        print(i, loss.item())
"""

SEQ_PADDING_IN_LOSS = """import torch
import torch.nn as nn

torch.manual_seed(0)
PAD = 0


def make(n, T=24):
    x = torch.zeros(n, T, dtype=torch.long)
    for r in range(n):
        L = int(torch.randint(4, 12, (1,)))
        start = int(torch.randint(1, 30, (1,)))
        x[r, :L] = (start + torch.arange(L)) % 29 + 1
    return x


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 24, padding_idx=PAD)
        self.rnn = nn.GRU(24, 48, batch_first=True)
        self.fc = nn.Linear(48, 30)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.fc(h)


model = Tagger()
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for it in range(120):
    seq = make(32)
    out = model(seq[:, :-1])
    loss = criterion(out.reshape(-1, 30), seq[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
"""

SEQ_SOFTMAX_DIM = """import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.scale = dim ** -0.5

    def forward(self, x):
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) * self.scale
        w = F.softmax(scores, dim=-1)
        return torch.bmm(w, self.v(x))


class Clf(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 32)
        self.att = SelfAttention(32)
        self.out = nn.Linear(32, 3)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        return self.out(self.att(h).mean(1))


clf = Clf()
opt = torch.optim.Adam(clf.parameters(), lr=3e-3)
for i in range(150):
    y = torch.randint(3, (32,))
    x = torch.randn(32, 10, 4)
    x[torch.arange(32), torch.randint(10, (32,)), y] += 4
    loss = F.cross_entropy(clf(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 30 == 0:
        print(i, loss.item())
"""

SEQ_LSTM_BATCH_FIRST = """import torch
from torch import nn

torch.manual_seed(0)


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.fc = nn.Linear(32, 2)

    def forward(self, x):
        o, _ = self.lstm(self.emb(x))
        return self.fc(o[:, -1])


net = Sentiment()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
lossf = nn.CrossEntropyLoss()
for it in range(150):
    y = torch.randint(2, (32,))
    x = torch.randint(20, 100, (32, 14))
    x[torch.arange(32), torch.randint(14, (32,))] = y * 5 + torch.randint(5, (32,))
    opt.zero_grad()
    loss = lossf(net(x), y)
    loss.backward()
    opt.step()
    if it % 30 == 0:
        print(it, loss.item())
"""

SEQ_POSITION_ZERO = """import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
V, T = 16, 10


class Copy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, 32)
        self.pos_emb = nn.Embedding(T, 32)
        self.enc = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(32, V)

    def forward(self, x):
        position_ids = torch.arange(x.size(1))
        h = self.tok(x) + self.pos_emb(position_ids)
        return self.out(self.enc(h))


net = Copy()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for i in range(150):
    x = torch.randint(V, (32, T))
    y = x.flip(1)
    loss = F.cross_entropy(net(x).reshape(-1, V), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 30 == 0:
        print(i, loss.item())
"""

PAIRS = [
    Pair(
        "question: softmax over queries",
        "PyTorch forum",
        "attention and sequences",
        SEQ_SOFTMAX_QUERIES,
        (("        w = F.softmax(scores, dim=-1)\n", "        w = F.softmax(scores, dim=-2)\n"),),
        "softmax_axis",
        "F.softmax(scores",
        STUCK,
        ("att",),
    ),
    Pair(
        "question: padding in the loss",
        "PyTorch forum",
        "attention and sequences",
        SEQ_PADDING_IN_LOSS,
        (("criterion = nn.CrossEntropyLoss(ignore_index=PAD)\n", "criterion = nn.CrossEntropyLoss()\n"),),
        "padding_in_loss",
        "criterion(out",
        (),
        (),
    ),
    Pair(
        "question: softmax over samples",
        "StackOverflow",
        "attention and sequences",
        SEQ_SOFTMAX_DIM,
        (("        w = F.softmax(scores, dim=-1)\n", "        w = F.softmax(scores, dim=0)\n"),),
        "softmax_axis",
        "F.softmax(scores",
        STUCK,
        ("att",),
    ),
    Pair(
        "question: batch and time exchanged",
        "StackOverflow",
        "attention and sequences",
        SEQ_LSTM_BATCH_FIRST,
        (
            (
                "        self.lstm = nn.LSTM(16, 32, batch_first=True)\n",
                "        self.lstm = nn.LSTM(16, 32, batch_first=False)\n",
            ),
        ),
        "batch_axis_mixed",
        "nn.LSTM(",
        STUCK,
        ("lstm",),
    ),
    Pair(
        "question: all positions zero",
        "PyTorch forum",
        "attention and sequences",
        SEQ_POSITION_ZERO,
        (
            (
                "        position_ids = torch.arange(x.size(1))\n",
                "        position_ids = torch.zeros(x.size(1), dtype=torch.long)\n",
            ),
        ),
        "positions_constant",
        "position_ids = ",
        STUCK,
        ("pos_emb",),
    ),
]
