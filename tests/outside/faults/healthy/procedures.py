"""Schedules, accumulation, folds, mixed precision and evaluation, without a fault."""

from __future__ import annotations

from outside.faults.healthy.case import with_head as _case

TRAININGS = [
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
    _case("early stopping on validation loss", """
import copy
x = torch.randn(300, 8)
y = x[:, :1] * 1.5 + 0.3 * torch.randn(300, 1)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
best, patience, kept = math.inf, 0, None
for epoch in range(30):
    model.train()
    for i in range(0, 200, 20):
        opt.zero_grad()
        F.mse_loss(model(x[i:i + 20]), y[i:i + 20]).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        validation = F.mse_loss(model(x[200:]), y[200:]).item()
    if validation < best:
        best, patience, kept = validation, 0, copy.deepcopy(model.state_dict())
    else:
        patience += 1
        if patience == 4:
            break
model.load_state_dict(kept)
"""),
    _case("five folds with a new model each", """
x = torch.randn(250, 6)
y = (x[:, 0] * x[:, 1] > 0).long()
for fold in range(5):
    held = torch.arange(250) % 5 == fold
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(5):
        model.train()
        order = torch.randperm(200)
        for i in range(0, 200, 25):
            pick = order[i:i + 25]
            opt.zero_grad()
            F.cross_entropy(model(x[~held][pick]), y[~held][pick]).backward()
            opt.step()
    model.eval()
    with torch.no_grad():
        print(fold, (model(x[held]).argmax(1) == y[held]).float().mean().item())
"""),
    _case("sweep over learning rates", """
x = torch.randn(300, 8)
y = x @ torch.randn(8, 1)
results = {}
for lr in (1e-4, 1e-3, 1e-2):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(40):
        pick = torch.randint(0, 300, (30,))
        loss = F.mse_loss(model(x[pick]), y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results[lr] = loss.item()
print(results)
"""),
    _case("evaluation before training", """
x = torch.randn(300, 8)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
def evaluate():
    model.eval()
    with torch.inference_mode():
        return F.cross_entropy(model(x[200:]), y[200:]).item()
print("before", evaluate())
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(6):
    model.train()
    for i in range(0, 200, 20):
        opt.zero_grad(set_to_none=True)
        F.cross_entropy(model(x[i:i + 20]), y[i:i + 20]).backward()
        opt.step()
    print(epoch, evaluate())
"""),
    _case("batches of two", """
x = torch.randn(120, 6)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 2))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
for epoch in range(3):
    for a, b in loader:
        opt.zero_grad()
        F.cross_entropy(model(a), b).backward()
        opt.step()
"""),
    _case("online learning, one sample at a time", """
x = torch.randn(200, 5)
w = torch.randn(5, 1)
y = x @ w
model = nn.Linear(5, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.02)
for i in range(200):
    loss = (model(x[i:i + 1]) - y[i:i + 1]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("gradient accumulation with a scaled loss", """
x = torch.randn(512, 10)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
accumulate = 4
for i in range(160):
    pick = torch.randint(0, 512, (8,))
    loss = F.cross_entropy(model(x[pick]), y[pick]) / accumulate
    loss.backward()
    if (i + 1) % accumulate == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
"""),
    _case("automatic mixed precision in bfloat16", """
x = torch.randn(400, 16)
y = (x[:, :4].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(60):
    pick = torch.randint(0, 400, (40,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x[pick]).float(), y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("warm-up from zero", """
x = torch.randn(400, 12)
y = (x[:, 0] + x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 2))
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 20 if step < 20 else 1.0)
for step in range(80):
    pick = torch.randint(0, 400, (32,))
    loss = F.cross_entropy(model(x[pick]), y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
    warm.step()
"""),
    _case("cosine to zero at every batch", """
x = torch.randn(400, 12)
y = x @ torch.randn(12, 1)
model = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=90)
for step in range(90):
    pick = torch.randint(0, 400, (32,))
    loss = F.mse_loss(model(x[pick]), y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
"""),
    _case("cyclic learning rate", """
x = torch.randn(400, 12)
y = (x[:, :6].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
schedule = torch.optim.lr_scheduler.CyclicLR(opt, 0.005, 0.2, step_size_up=12)
for step in range(100):
    pick = torch.randint(0, 400, (32,))
    loss = F.cross_entropy(model(x[pick]), y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
"""),
    _case("one-cycle policy", """
x = torch.rand(400, 1, 8, 8)
y = (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long()
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=64)
for epoch in range(8):
    for i in range(0, 400, 50):
        loss = F.cross_entropy(model(x[i:i + 50]), y[i:i + 50])
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
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
    _case("augmentation in workers", """
from torch.utils.data import Dataset
class Augmented(Dataset):
    def __init__(self):
        self.x = torch.rand(128, 1, 8, 8)
        self.y = (self.x.mean((1, 2, 3)) > 0.5).long()
    def __len__(self):
        return 128
    def __getitem__(self, i):
        image = self.x[i]
        return (image.flip(-1) if torch.rand(1) < 0.5 else image) + 0.05 * torch.randn(1, 8, 8), self.y[i]
loader = DataLoader(Augmented(), batch_size=16, shuffle=True, num_workers=2, worker_init_fn=lambda w: torch.manual_seed(w))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(3):
    for a, b in loader:
        opt.zero_grad()
        F.cross_entropy(model(a), b).backward()
        opt.step()
"""),
    _case("Monte Carlo dropout for uncertainty", """
x = torch.linspace(-2, 2, 200).unsqueeze(1)
y = torch.sin(2 * x) + 0.1 * torch.randn(200, 1)
model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(100):
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()
model.eval()
for module in model:
    if isinstance(module, nn.Dropout):
        module.train()
with torch.no_grad():
    draws = torch.stack([model(x) for _ in range(10)])
print(draws.std(0).mean().item())
"""),
    _case("sharpness-aware minimisation", """
x = torch.randn(400, 12)
y = (x[:, 0] - x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(60):
    pick = torch.randint(0, 400, (40,))
    F.cross_entropy(model(x[pick]), y[pick]).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    moved = [p.grad * 0.05 / (norm + 1e-12) for p in model.parameters()]
    with torch.no_grad():
        for p, e in zip(model.parameters(), moved):
            p.add_(e)
    base.zero_grad()
    F.cross_entropy(model(x[pick]), y[pick]).backward()
    with torch.no_grad():
        for p, e in zip(model.parameters(), moved):
            p.sub_(e)
    base.step()
    base.zero_grad()
"""),
    _case("Reptile with copies of the model", """
import copy
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
for outer in range(25):
    inner = copy.deepcopy(model)
    opt = torch.optim.SGD(inner.parameters(), lr=0.02)
    phase = torch.rand(1) * 3
    for _ in range(5):
        x = torch.rand(20, 1) * 6 - 3
        loss = F.mse_loss(inner(x), torch.sin(x + phase))
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        for slow, fast in zip(model.parameters(), inner.parameters()):
            slow.add_(0.3 * (fast - slow))
"""),
    _case("bfloat16 autocast, accumulation and clipping", """
x = torch.randn(640, 16)
y = (x[:, :3].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 2))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, (k + 1) / 5))
for step in range(120):
    pick = torch.randint(0, 640, (16,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x[pick]), y[pick]) / 4
    loss.backward()
    if (step + 1) % 4 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        opt.zero_grad(set_to_none=True)
"""),
    _case("DistributedSampler over epochs", """
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
x = torch.randn(300, 6)
data = TensorDataset(x, x[:, :1] * 2)
sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True, seed=5)
held_out = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
loader, validation = DataLoader(data, 25, sampler=sampler), DataLoader(data, 25, sampler=held_out)
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(5):
    sampler.set_epoch(epoch)
    model.train()
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        print(sum(F.mse_loss(model(a), b).item() for a, b in validation))
"""),
]  # fmt: skip
