"""Correct scripts that faults are put into."""

from __future__ import annotations

HEAD = """import math
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
"""

CLASSIFIER = (
    HEAD
    + """
centers = torch.randn(4, 20) * 1.5
labels = torch.randint(0, 4, (512,))
inputs = centers[labels] + torch.randn(512, 20)
inputs = (inputs - inputs.mean(0)) / inputs.std(0)
loader = DataLoader(TensorDataset(inputs[:384], labels[:384]), batch_size=32, shuffle=True)
test_x, test_y = inputs[384:], labels[384:]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(20, 64)
        self.fc2 = nn.Linear(64, 32)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        x = self.drop(x)
        return self.head(x)

def accuracy(model):
    model.eval()
    with torch.no_grad():
        right = (model(test_x).argmax(1) == test_y).float().mean().item()
    model.train()
    return right

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(5):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item(), accuracy(model))
"""
)

BINARY = (
    HEAD
    + """
inputs = torch.randn(400, 10)
labels = (inputs[:, 0] + inputs[:, 1] * inputs[:, 2] > 0).float()
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(8):
    order = torch.randperm(400)
    for start in range(0, 400, 40):
        batch = order[start:start + 40]
        optimizer.zero_grad()
        output = model(inputs[batch])
        loss = criterion(output, labels[batch].unsqueeze(1))
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
"""
)

REGRESSION = (
    HEAD
    + """
inputs = torch.rand(480, 6) * 2 - 1
targets = 3 * inputs[:, :1] - 2 * inputs[:, 1:2] ** 2 + 4 + 0.05 * torch.randn(480, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=48, shuffle=True)
model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(8):
    for x, y in loader:
        prediction = model(x)
        loss = F.mse_loss(prediction, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
"""
)

CNN = (
    HEAD
    + """
labels = torch.randint(0, 3, (240,))
images = torch.rand(240, 1, 12, 12) * 0.4
for i, label in enumerate(labels):
    images[i, 0, 4 * label:4 * label + 4] += 0.5
images = (images - images.mean()) / images.std()
loader = DataLoader(TensorDataset(images[:192], labels[:192]), batch_size=24, shuffle=True)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 9, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.head(x.flatten(1))

def evaluate(model):
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(images[192:]), labels[192:]).item()

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
criterion = nn.CrossEntropyLoss()
for epoch in range(6):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(epoch, loss.item(), evaluate(model))
"""
)

LSTM = (
    HEAD
    + """
PAD = 0
lengths = torch.randint(4, 13, (256,))
tokens = torch.randint(1, 12, (256, 12))
tokens[torch.arange(12)[None] >= lengths[:, None]] = PAD
targets = torch.where(tokens == PAD, torch.full_like(tokens, -100), tokens)

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 24, padding_idx=PAD)
        self.lstm = nn.LSTM(24, 32, batch_first=True)
        self.out = nn.Linear(32, 12)

    def forward(self, x):
        hidden, _ = self.lstm(self.embed(x))
        return self.out(hidden)

model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    pick = torch.randint(0, 256, (32,))
    logits = model(tokens[pick])
    loss = F.cross_entropy(logits.reshape(-1, 12), targets[pick].reshape(-1), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
"""
)

GPT = (
    HEAD
    + """
text = torch.randint(0, 16, (4000,))
text[1::2] = (text[::2] * 3 + 1) % 16

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(16, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList([Block(32, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 16, bias=False)
        nn.init.normal_(self.tok.weight, std=0.1)
        self.head.weight = self.tok.weight

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
for step in range(90):
    start = torch.randint(0, 3980, (16,))
    batch = torch.stack([text[s:s + 17] for s in start.tolist()])
    x, y = batch[:, :-1], batch[:, 1:]
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
)

DEEP = (
    HEAD
    + """
inputs = torch.randn(512, 16)
labels = (inputs[:, :8].sum(1) > 0).long()
layers = []
for i in range(10):
    layers += [nn.Linear(16, 16), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(16, 2))
for module in model:
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(module.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(80):
    pick = torch.randint(0, 512, (64,))
    loss = F.cross_entropy(model(inputs[pick]), labels[pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)

MULTILABEL = (
    HEAD
    + """
inputs = torch.randn(400, 12)
labels = (inputs @ torch.randn(12, 5) > 0.3).float()
loader = DataLoader(TensorDataset(inputs, labels), batch_size=40, shuffle=True)
model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5), nn.Sigmoid())
criterion = nn.BCELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(8):
    for x, y in loader:
        probabilities = model(x)
        loss = criterion(probabilities, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
)

ACCUMULATION = (
    HEAD
    + """
inputs = torch.randn(512, 10)
labels = (inputs.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
every = 4
optimizer.zero_grad()
for step in range(160):
    pick = torch.randint(0, 512, (16,))
    loss = F.cross_entropy(model(inputs[pick]), labels[pick])
    (loss / every).backward()
    if (step + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
)

TRANSFER = (
    HEAD
    + """
inputs = torch.randn(384, 16)
labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
backbone = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())

class Classifier(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        features = self.backbone(x)
        return self.head(features)

model = Classifier(backbone)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(60):
    pick = torch.randint(0, 384, (48,))
    loss = F.cross_entropy(model(inputs[pick]), labels[pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)

HALF = (
    HEAD
    + """
inputs = torch.randn(256, 16)
targets = inputs[:, :1] * 2
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(60):
    pick = torch.randint(0, 256, (64,))
    prediction = model(inputs[pick].bfloat16())
    loss = F.mse_loss(prediction.float(), targets[pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)
