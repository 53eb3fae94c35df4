"""More trainings that have no fault, of kinds that `healthy` does not have."""

from __future__ import annotations

from outside.faults.bases import HEAD
from outside.faults.case import Healthy
from outside.faults.published_bases import KERAS_CLASSES, KERAS_HEAD


def _case(name: str, text: str) -> Healthy:
    return Healthy(name, HEAD + text)


TRAININGS = [
    _case("BYOL with a momentum encoder", """
import copy
data = torch.randn(512, 16)
online = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
target = copy.deepcopy(online)
for p in target.parameters():
    p.requires_grad_(False)
opt = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=1e-3)
for step in range(60):
    x = data[torch.randint(0, 512, (64,))]
    a, b = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
    with torch.no_grad():
        ta, tb = target(a), target(b)
    loss = 4 - 2 * (F.cosine_similarity(predictor(online(a)), tb).mean() + F.cosine_similarity(predictor(online(b)), ta).mean())
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p, q in zip(online.parameters(), target.parameters()):
            q.mul_(0.99).add_(p, alpha=0.01)
"""),
    _case("SimSiam with stop-gradient", """
data = torch.randn(512, 16)
encoder = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
predictor = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32))
opt = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9, weight_decay=1e-4)
for step in range(60):
    x = data[torch.randint(0, 512, (64,))]
    z1, z2 = encoder(x + 0.1 * torch.randn_like(x)), encoder(x + 0.1 * torch.randn_like(x))
    p1, p2 = predictor(z1), predictor(z2)
    loss = -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("InfoNCE over a batch of pairs", """
x, w = torch.randn(512, 12), torch.randn(12, 20)
pairs = x @ w / 4
image, text = nn.Linear(12, 16), nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 16))
scale = nn.Parameter(torch.tensor(2.6))
opt = torch.optim.AdamW([*image.parameters(), *text.parameters(), scale], lr=3e-3)
for step in range(70):
    pick = torch.randint(0, 512, (32,))
    a, b = F.normalize(image(x[pick]), dim=1), F.normalize(text(pairs[pick]), dim=1)
    logits = a @ b.t() * scale.exp()
    labels = torch.arange(32)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("adversarial training by projected gradients", """
x = torch.randn(400, 10)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(40):
    pick = torch.randint(0, 400, (50,))
    delta = torch.zeros(50, 10, requires_grad=True)
    for _ in range(3):
        inner = F.cross_entropy(model(x[pick] + delta), y[pick])
        (gradient,) = torch.autograd.grad(inner, delta)
        delta = (delta + 0.05 * gradient.sign()).clamp(-0.1, 0.1).detach().requires_grad_()
    loss = F.cross_entropy(model(x[pick] + delta.detach()), y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("adversarial examples by backward", """
x = torch.rand(300, 16)
y = (x[:, :8].sum(1) > 4).long()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(60):
    pick = torch.randint(0, 300, (32,))
    given = x[pick].clone().requires_grad_()
    F.cross_entropy(model(given), y[pick]).backward()
    attacked = (given + 0.02 * given.grad.sign()).clamp(0, 1).detach()
    opt.zero_grad()
    loss = 0.5 * (F.cross_entropy(model(x[pick]), y[pick]) + F.cross_entropy(model(attacked), y[pick]))
    loss.backward()
    opt.step()
"""),
    _case("MAML with inner steps", """
from torch.func import functional_call
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
meta = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(60):
    meta.zero_grad()
    total = 0.0
    for _ in range(3):
        phase, x = torch.rand(1) * 3, torch.rand(20, 1) * 6 - 3
        y = torch.sin(x + phase)
        named = dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, named, x[:10]), y[:10])
        gradients = torch.autograd.grad(inner, named.values(), create_graph=True)
        fast = {k: p - 0.05 * g for (k, p), g in zip(named.items(), gradients)}
        total = total + F.mse_loss(functional_call(model, fast, x[10:]), y[10:]) / 3
    total.backward()
    meta.step()
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
    _case("label smoothing and class weights", """
x = torch.randn(400, 10)
y = (x[:, 0] > 0.6).long()
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.4, 1.6]), label_smoothing=0.1)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(60):
    pick = torch.randint(0, 400, (40,))
    opt.zero_grad()
    criterion(model(x[pick]), y[pick]).backward()
    opt.step()
"""),
    _case("mixup with soft labels", """
x = torch.randn(400, 10)
y = F.one_hot((x[:, 0] > 0).long() + (x[:, 1] > 0).long(), 3).float()
model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 3))
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(70):
    a, b = torch.randint(0, 400, (2, 40))
    lam = torch.rand(40, 1)
    loss = F.cross_entropy(model(lam * x[a] + (1 - lam) * x[b]), lam * y[a] + (1 - lam) * y[b])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("focal loss with rare positives", """
x = torch.randn(800, 8)
y = (x[:, 0] + x[:, 1] > 2.2).float().unsqueeze(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
nn.init.constant_(model[-1].bias, -2.0)
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(70):
    pick = torch.randint(0, 800, (64,))
    logits = model(x[pick])
    ce = F.binary_cross_entropy_with_logits(logits, y[pick], reduction="none")
    p = torch.sigmoid(logits)
    right = p * y[pick] + (1 - p) * (1 - y[pick])
    loss = ((1 - right) ** 2 * ce).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("multi-label tags", """
x = torch.randn(500, 14)
tags = (x @ torch.randn(14, 9) > 1.5).float()
model = nn.Sequential(nn.Linear(14, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 9))
criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((9,), 2.0))
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
for epoch in range(6):
    model.train()
    for i in range(0, 400, 40):
        opt.zero_grad()
        criterion(model(x[i:i + 40]), tags[i:i + 40]).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        print(criterion(model(x[400:]), tags[400:]).item())
"""),
    _case("ordinal regression by cumulative logits", """
x = torch.randn(400, 6)
level = torch.bucketize(x[:, 0] + 0.5 * x[:, 1], torch.tensor([-1.0, 0.0, 1.0]))
above = (level.unsqueeze(1) > torch.arange(3)).float()
backbone = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1, bias=False))
cuts = nn.Parameter(torch.tensor([1.0, 0.0, -1.0]))
opt = torch.optim.Adam([*backbone.parameters(), cuts], lr=1e-2)
for step in range(80):
    pick = torch.randint(0, 400, (40,))
    loss = F.binary_cross_entropy_with_logits(backbone(x[pick]) + cuts, above[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("Cox survival model", """
x = torch.randn(300, 8)
risk = x[:, 0] - 0.5 * x[:, 1]
time = torch.empty(300).exponential_() / risk.exp()
event = torch.rand(300) < 0.7
model = nn.Sequential(nn.Linear(8, 32), nn.SELU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
order = time.argsort(descending=True)
x, event = x[order], event[order].float()
for step in range(80):
    score = model(x).squeeze(1)
    loss = -((score - torch.logcumsumexp(score, 0)) * event).sum() / event.sum()
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
    _case("heteroscedastic regression by hand", """
x = torch.rand(400, 1) * 4
y = torch.sin(x) + 0.1 * x * torch.randn(400, 1)
model = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 2))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(120):
    pick = torch.randint(0, 400, (64,))
    mean, raw = model(x[pick]).chunk(2, 1)
    sigma = F.softplus(raw) + 1e-3
    loss = (torch.log(sigma) + 0.5 * ((y[pick] - mean) / sigma) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("cross entropy written out, correct", """
x = torch.randn(300, 6)
y = F.one_hot((x[:, 0] > 0).long() + (x[:, 1] > 0).long(), 3).float()
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3), nn.Softmax(dim=1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(80):
    pick = torch.randint(0, 300, (50,))
    p = model(x[pick])
    loss = -(y[pick] * torch.log(p + 1e-8)).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("actor and critic with an entropy bonus", """
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=3e-3)
for episode in range(60):
    states = torch.randn(40, 4)
    p = torch.softmax(policy(states), 1)
    actions = torch.multinomial(p, 1)
    rewards = torch.where(actions.squeeze(1) == (states[:, 0] > 0).long(), 1.0, 0.0)
    advantage = rewards - critic(states).squeeze(1)
    chosen = torch.log(p.gather(1, actions).squeeze(1) + 1e-8)
    entropy = -(p * torch.log(p + 1e-8)).sum(1).mean()
    loss = -(chosen * advantage.detach()).mean() + 0.5 * advantage.pow(2).mean() - 0.01 * entropy
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("Wasserstein critic with gradient penalty", """
real = torch.randn(512, 2) * 0.5 + 1
G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
g_opt = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
d_opt = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.9))
for step in range(30):
    for _ in range(3):
        x, fake = real[torch.randint(0, 512, (64,))], G(torch.randn(64, 4)).detach()
        mix = (x + torch.rand(64, 1) * (fake - x)).requires_grad_()
        (g,) = torch.autograd.grad(D(mix).sum(), mix, create_graph=True)
        d_loss = D(fake).mean() - D(x).mean() + 10 * ((g.norm(2, 1) - 1) ** 2).mean()
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
    g_loss = -D(G(torch.randn(64, 4))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
"""),
    _case("ridge penalty written out", """
x = torch.randn(300, 20)
y = x[:, :1] * 2 - x[:, 1:2] + 0.1 * torch.randn(300, 1)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100):
    pick = torch.randint(0, 300, (50,))
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    loss = F.mse_loss(model(x[pick]), y[pick]) + 1e-3 * penalty
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("matrix factorisation for ratings", """
users, items = torch.randint(0, 40, (600,)), torch.randint(0, 30, (600,))
taste, kind = torch.randn(40, 3), torch.randn(30, 3)
ratings = (taste[users] * kind[items]).sum(1)
class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(40, 8), nn.Embedding(30, 8)
    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1)
model = Factors()
opt = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=1e-5)
for step in range(100):
    pick = torch.randint(0, 600, (64,))
    loss = F.mse_loss(model(users[pick], items[pick]), ratings[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("U-Net for denoising", """
clean = torch.rand(64, 1, 16, 16)
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.mid = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 1, 1)
    def forward(self, x):
        a = F.relu(self.down(x))
        b = F.relu(self.mid(F.max_pool2d(a, 2)))
        return self.out(torch.cat([a, F.relu(self.up(b))], 1))
model = UNet()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(40):
    x = clean[torch.randint(0, 64, (16,))]
    loss = F.l1_loss(model(x + 0.2 * torch.randn_like(x)), x)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("triplets with hard negatives", """
x = torch.randn(300, 10)
y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(60):
    pick = torch.randint(0, 300, (48,))
    z, labels = F.normalize(net(x[pick]), dim=1), y[pick]
    distance = torch.cdist(z, z)
    same = labels[:, None] == labels[None]
    positive = (distance * same).max(1).values
    negative = (distance + 10 * same).min(1).values
    loss = F.relu(positive - negative + 0.3).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("stochastic weight averaging", """
from torch.optim.swa_utils import AveragedModel, update_bn
x = torch.randn(400, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
averaged = AveragedModel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(6):
    model.train()
    for a, b in loader:
        opt.zero_grad()
        F.cross_entropy(model(a), b).backward()
        opt.step()
    if epoch > 2:
        averaged.update_parameters(model)
update_bn(loader, averaged)
averaged.eval()
with torch.no_grad():
    print(F.cross_entropy(averaged(x), y).item())
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
    _case("vector quantisation with a straight-through estimator", """
x = torch.randn(400, 8)
encoder, decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
codes = nn.Embedding(16, 4)
opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters(), *codes.parameters()], lr=2e-3)
for step in range(80):
    batch = x[torch.randint(0, 400, (64,))]
    z = encoder(batch)
    nearest = torch.cdist(z, codes.weight).argmin(1)
    q = codes(nearest)
    loss = F.mse_loss(decoder(z + (q - z).detach()), batch) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    Healthy("Keras: classes", KERAS_CLASSES),
    Healthy("Keras: convolutions, dropout and a schedule", KERAS_HEAD + """
from sklearn.datasets import load_digits
digits = load_digits()
x, y = (digits.images[..., None] / 16).astype("float32"), digits.target
model = keras.Sequential([
    keras.Input((8, 8, 1)), layers.Conv2D(8, 3, activation="relu"), layers.BatchNormalization(), layers.Flatten(),
    layers.Dropout(0.3), layers.Dense(10),
])
rate = keras.optimizers.schedules.CosineDecay(0.01, 60)
model.compile(keras.optimizers.AdamW(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x[:1000], y[:1000], batch_size=50, epochs=3, validation_data=(x[1000:1200], y[1000:1200]), verbose=0)
"""),
]  # fmt: skip
