"""Further kinds of training without a fault, in the style of public examples."""

from __future__ import annotations

from outside.faults.healthy.case import with_head as _case

TRAININGS = [
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
    _case("quantile regression with three quantiles", """
quantiles = torch.tensor([0.1, 0.5, 0.9])
x = torch.rand(800, 1) * 4 - 2
y = x ** 2 / 2 + torch.randn(800, 1) * (0.1 + 0.2 * x.abs())
model = nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(100):
    pick = torch.randint(0, 800, (64,))
    error = y[pick] - model(x[pick])
    loss = torch.max(quantiles * error, (quantiles - 1) * error).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("mixture density network", """
x = torch.rand(600, 1) * 2 - 1
y = torch.where(torch.rand(600, 1) > 0.5, x, -x) + 0.1 * torch.randn(600, 1)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 9))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(80):
    pick = torch.randint(0, 600, (64,))
    logits, mean, log_std = net(x[pick]).chunk(3, dim=1)
    components = torch.distributions.Normal(mean, log_std.clamp(-5, 3).exp())
    loss = -torch.logsumexp(F.log_softmax(logits, 1) + components.log_prob(y[pick]), dim=1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("normalising flow with affine couplings", """
from sklearn.datasets import make_moons
points = torch.tensor(make_moons(600, noise=0.05, random_state=0)[0], dtype=torch.float32)

class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        log_scale, shift = self.net(a).chunk(2, 1)
        log_scale = torch.tanh(log_scale)
        b = b * log_scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], 1), log_scale.sum(1)

flow = nn.ModuleList([Coupling(i % 2 == 1) for i in range(6)])
opt = torch.optim.Adam(flow.parameters(), lr=2e-3)
for step in range(80):
    z, total = points[torch.randint(0, 600, (100,))], 0.0
    for layer in flow:
        z, log_det = layer(z)
        total = total + log_det
    loss = (0.5 * z.square().sum(1) + 1.8379 - total).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("energy model with Langevin samples", """
data = torch.randn(500, 2) * 0.3 + torch.tensor([1.0, -1.0])
energy = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(energy.parameters(), lr=1e-3)
buffer = torch.rand(200, 2) * 4 - 2
for step in range(50):
    index = torch.randint(0, 200, (50,))
    sample = buffer[index].clone().requires_grad_(True)
    for _ in range(8):
        (slope,) = torch.autograd.grad(energy(sample).sum(), sample)
        sample = (sample - 0.1 * slope + 0.02 * torch.randn_like(sample)).detach().requires_grad_(True)
    buffer[index] = sample.detach()
    real, fake = energy(data[torch.randint(0, 500, (50,))]), energy(sample.detach())
    loss = real.mean() - fake.mean() + 0.1 * (real ** 2 + fake ** 2).mean()
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
    _case("segmentation by dice and cross entropy", """
grid = torch.stack(torch.meshgrid(torch.arange(16.), torch.arange(16.), indexing="ij"))
def batch(n):
    centre = torch.rand(n, 2, 1, 1) * 10 + 3
    mask = ((grid - centre).square().sum(1) < 9).float().unsqueeze(1)
    return mask + 0.4 * torch.randn(n, 1, 16, 16), mask
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
for step in range(60):
    image, mask = batch(8)
    logit = net(image)
    p = torch.sigmoid(logit)
    dice = 1 - (2 * (p * mask).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
    loss = F.binary_cross_entropy_with_logits(logit, mask) + dice.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 19:
        net.eval()
        with torch.no_grad():
            image, mask = batch(8)
            print(((net(image) > 0).float() == mask).float().mean())
        net.train()
"""),
    _case("word vectors with negative samples", """
words = torch.randint(0, 50, (3000,))
inner, outer = nn.Embedding(50, 16), nn.Embedding(50, 16)
nn.init.uniform_(inner.weight, -0.03, 0.03)
nn.init.zeros_(outer.weight)
opt = torch.optim.Adam([*inner.parameters(), *outer.parameters()], lr=0.02)
for step in range(60):
    i = torch.randint(0, 2998, (128,))
    centre, context = words[i], words[i] // 5 * 5 + torch.randint(0, 5, (128,))
    noise = torch.randint(0, 50, (128, 5))
    v = inner(centre)
    positive = F.logsigmoid((v * outer(context)).sum(1))
    negative = F.logsigmoid(-torch.bmm(outer(noise), v.unsqueeze(2)).squeeze(2)).sum(1)
    loss = -(positive + negative).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("DDPG with slow targets", """
import copy
actor = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())
critic = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
for step in range(80):
    s, s2 = torch.randn(64, 3), torch.randn(64, 3)
    with torch.no_grad():
        a = (actor(s) + 0.2 * torch.randn(64, 1)).clamp(-1, 1)
        r = -(a - torch.tanh(s[:, :1])).square()
        target = r + 0.9 * slow_critic(torch.cat([s2, slow_actor(s2)], 1))
    critic_loss = F.mse_loss(critic(torch.cat([s, a], 1)), target)
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()
    actor_loss = -critic(torch.cat([s, actor(s)], 1)).mean()
    actor_opt.zero_grad()
    actor_loss.backward()
    actor_opt.step()
    with torch.no_grad():
        for slow, fast in ((slow_actor, actor), (slow_critic, critic)):
            for p, q in zip(slow.parameters(), fast.parameters()):
                p.mul_(0.99).add_(q, alpha=0.01)
"""),
    _case("routes whose cost is minimised by the score function", """
from torch.distributions import Categorical
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
baseline = None
for step in range(80):
    cities = torch.rand(64, 3, 2)
    dist = Categorical(logits=net(cities.flatten(1)))
    chosen = dist.sample()
    cost = cities[torch.arange(64), chosen].norm(dim=1)
    baseline = cost.mean() if baseline is None else 0.8 * baseline + 0.2 * cost.mean()
    log_likelihood = dist.log_prob(chosen)
    loss = ((cost - baseline) * log_likelihood).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("policy gradient on minus the reward", """
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
rewards_seen = []
for episode in range(60):
    states = torch.randn(24, 4)
    log_p = F.log_softmax(policy(states), dim=1)
    action = torch.multinomial(log_p.exp(), 1)
    reward = ((states[:, 0] > 0).long() == action[:, 0]).float()
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    loss = (log_p.gather(1, action)[:, 0] * -advantage).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    rewards_seen.append(reward.mean().item())
"""),
    _case("policy by cross entropy of actions", """
policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
opt = torch.optim.RMSprop(policy.parameters(), lr=3e-3)
for episode in range(50):
    s = torch.randn(32, 4)
    with torch.no_grad():
        a = torch.distributions.Categorical(logits=policy(s)).sample()
    returns = (a == s[:, :3].argmax(1)).float() - 0.33
    loss = (F.cross_entropy(policy(s), a, reduction="none") * returns).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("domain adaptation by gradient reversal", """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -0.3 * g

features = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
label, domain = nn.Linear(32, 2), nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.SGD([*features.parameters(), *label.parameters(), *domain.parameters()], lr=0.05, momentum=0.9)
for step in range(80):
    source, target = torch.randn(32, 8), torch.randn(32, 8) + 0.7
    y = (source[:, 0] > 0).long()
    h = features(torch.cat([source, target]))
    d = torch.cat([torch.zeros(32), torch.ones(32)]).long()
    loss = F.cross_entropy(label(h[:32]), y) + F.cross_entropy(domain(Reverse.apply(h)), d)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("conditional GAN with hinge losses and two critic steps", """
G = nn.Sequential(nn.Linear(8 + 4, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2 + 4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
g_opt = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.0, 0.9))
d_opt = torch.optim.Adam(D.parameters(), lr=4e-4, betas=(0.0, 0.9))
centres = torch.tensor([[1., 1.], [-1., 1.], [1., -1.], [-1., -1.]])
def real(n):
    c = torch.randint(0, 4, (n,))
    return centres[c] + 0.1 * torch.randn(n, 2), F.one_hot(c, 4).float()
for step in range(60):
    for _ in range(2):
        x, c = real(48)
        fake = G(torch.cat([torch.randn(48, 8), c], 1)).detach()
        d_loss = F.relu(1 - D(torch.cat([x, c], 1))).mean() + F.relu(1 + D(torch.cat([fake, c], 1))).mean()
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
    _, c = real(48)
    g_loss = -D(torch.cat([G(torch.cat([torch.randn(48, 8), c], 1)), c], 1)).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
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
    _case("Barlow twins", """
base = torch.randn(400, 20)
encoder = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
opt = torch.optim.Adam(encoder.parameters(), lr=2e-3)
for step in range(60):
    x = base[torch.randint(0, 400, (64,))]
    a, b = encoder(x + 0.2 * torch.randn_like(x)), encoder(x + 0.2 * torch.randn_like(x))
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    c = a.T @ b / 64
    diagonal = torch.diagonal(c)
    loss = (diagonal - 1).square().sum() + 0.01 * (c.square().sum() - diagonal.square().sum())
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("boxes and classes with an assignment", """
grid = torch.arange(6).float()
body = nn.Sequential(nn.Conv1d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 16, 3, padding=1), nn.ReLU())
cls, box = nn.Conv1d(16, 2, 1), nn.Conv1d(16, 2, 1)
opt = torch.optim.AdamW([*body.parameters(), *cls.parameters(), *box.parameters()], lr=5e-3, weight_decay=1e-4)
for step in range(70):
    at, size = torch.randint(0, 24, (32,)), torch.randint(2, 6, (32,))
    signal = 0.1 * torch.randn(32, 1, 30)
    for i in range(32):
        signal[i, 0, at[i]:at[i] + size[i]] += 1
    h = body(signal)
    there = torch.zeros(32, 30).long()
    there[torch.arange(32), at] = 1
    found = box(h)[torch.arange(32), :, at]
    goal = torch.stack([size / 6, (at % 6) / 6.0], 1)
    loss = F.cross_entropy(cls(h), there, weight=torch.tensor([0.2, 1.0])) + F.smooth_l1_loss(found, goal)
    opt.zero_grad()
    loss.backward()
    opt.step()
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
    _case("link prediction with sampled non-edges", """
n = 60
group = torch.arange(n) % 4
edges = torch.tensor([(i, j) for i in range(n) for j in range(n) if i != j and group[i] == group[j]])
adjacency = torch.eye(n)
adjacency[edges[:, 0], edges[:, 1]] = 1
adjacency = adjacency / adjacency.sum(1, keepdim=True)
feature = nn.Embedding(n, 16)
first, second = nn.Linear(16, 32), nn.Linear(32, 16)
opt = torch.optim.Adam([*feature.parameters(), *first.parameters(), *second.parameters()], lr=0.01)
for epoch in range(50):
    h = second(F.relu(adjacency @ first(adjacency @ feature.weight)))
    some = edges[torch.randint(0, len(edges), (128,))]
    none = torch.randint(0, n, (128, 2))
    score = torch.cat([(h[some[:, 0]] * h[some[:, 1]]).sum(1), (h[none[:, 0]] * h[none[:, 1]]).sum(1)])
    loss = F.binary_cross_entropy_with_logits(score, torch.cat([torch.ones(128), torch.zeros(128)]))
    opt.zero_grad()
    loss.backward()
    opt.step()
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
