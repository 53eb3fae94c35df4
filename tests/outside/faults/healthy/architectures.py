"""Trainings of graphs, images, sequences and experts, and of parts of models, without a fault."""

from __future__ import annotations

from outside.faults.healthy.case import with_head as _case

TRAININGS = [
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
    _case("speech with CTC", """
frames = torch.randn(64, 24, 10)
labels = torch.randint(1, 6, (64, 4))
for n in range(64):
    for k in range(4):
        frames[n, k * 6:k * 6 + 6, labels[n, k]] += 3
model = nn.GRU(10, 24, batch_first=True, bidirectional=True)
head = nn.Linear(48, 6)
opt = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
for step in range(50):
    pick = torch.randint(0, 64, (16,))
    out, _ = model(frames[pick])
    logp = F.log_softmax(head(out), dim=-1).transpose(0, 1)
    loss = ctc(logp, labels[pick], torch.full((16,), 24), torch.full((16,), 4))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("tied embedding in a language model", """
text = torch.randint(0, 24, (3000,))
text[1::2] = (text[::2] + 5) % 24
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 48)
        self.rnn = nn.GRU(48, 48, batch_first=True)
        self.decode = nn.Linear(48, 24)
        self.decode.weight = self.embed.weight
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
    def forward(self, x, h=None):
        out, h = self.rnn(self.embed(x), h)
        return self.decode(out), h
model = LM()
opt = torch.optim.SGD(model.parameters(), lr=4.0)
h = None
for i in range(70):
    start = torch.arange(8) * 300 + (i * 4) % 280
    batch = torch.stack([text[s:s + 17] for s in start.tolist()])
    h = None if h is None else h.detach()
    logits, h = model(batch[:, :-1], h)
    loss = F.cross_entropy(logits.reshape(-1, 24), batch[:, 1:].reshape(-1))
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
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
    _case("transfer learning, head first and all of it later", """
x = torch.randn(400, 12)
y = (x[:, 0] + x[:, 1] > 0).long()
body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
head = nn.Linear(16, 2)
model = nn.Sequential(body, head)
body.requires_grad_(False)
opt = torch.optim.Adam(head.parameters(), lr=1e-2)
for step in range(40):
    pick = torch.randint(0, 400, (40,))
    opt.zero_grad()
    F.cross_entropy(model(x[pick]), y[pick]).backward()
    opt.step()
body.requires_grad_(True)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(40):
    pick = torch.randint(0, 400, (40,))
    opt.zero_grad()
    F.cross_entropy(model(x[pick]), y[pick]).backward()
    opt.step()
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
    _case("translation with padding and teacher forcing", """
PAD, BOS, EOS = 0, 1, 2
def batch(n):
    lengths = torch.randint(2, 7, (n,))
    source = torch.zeros(n, 8, dtype=torch.long)
    target = torch.zeros(n, 9, dtype=torch.long)
    for i, k in enumerate(lengths):
        words = torch.randint(3, 20, (int(k),))
        source[i, :k] = words
        target[i, 0], target[i, 1:k + 1], target[i, k + 1] = BOS, words.flip(0), EOS
    return source, target

class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 24, padding_idx=PAD)
        self.encoder = nn.GRU(24, 32, batch_first=True)
        self.decoder = nn.GRU(24, 32, batch_first=True)
        self.out = nn.Linear(32, 20)

    def forward(self, source, target):
        _, state = self.encoder(self.embed(source))
        hidden, _ = self.decoder(self.embed(target), state)
        return self.out(hidden)

model = Seq2Seq()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
for step in range(60):
    source, target = batch(32)
    logits = model(source, target[:, :-1])
    loss = criterion(logits.reshape(-1, 20), target[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
"""),
    _case("coordinates to colours with sines", """
class Sine(nn.Module):
    def __init__(self, i, o, first=False):
        super().__init__()
        self.linear = nn.Linear(i, o)
        bound = 1 / i if first else (6 / i) ** 0.5 / 30
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(30 * self.linear(x))

xy = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24), indexing="ij"), -1).reshape(-1, 2)
picture = torch.sin(4 * xy[:, :1]) * torch.cos(3 * xy[:, 1:])
net = nn.Sequential(Sine(2, 48, True), Sine(48, 48), nn.Linear(48, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(60):
    loss = F.mse_loss(net(xy), picture)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("prompt tuning of a frozen transformer", """
class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens, prompt):
        h = torch.cat([prompt.expand(len(tokens), -1, -1), self.embed(tokens)], 1)
        return self.head(self.block(h)[:, 0])

model = Tiny()
for p in model.parameters():
    p.requires_grad_(False)
prompt = nn.Parameter(0.1 * torch.randn(1, 4, 16))
opt = torch.optim.Adam([prompt], lr=0.05)
tokens = torch.randint(0, 20, (200, 6))
y = (tokens[:, 0] > 9).long()
for step in range(80):
    pick = torch.randint(0, 200, (32,))
    loss = F.cross_entropy(model(tokens[pick], prompt), y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
]  # fmt: skip
