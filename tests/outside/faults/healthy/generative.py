"""Trainings of generative models, without a fault."""

from __future__ import annotations

from outside.faults.healthy.case import with_head as _case

TRAININGS = [
    _case("GAN", """
real = torch.randn(512, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.7]]) + 2
G = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
g_opt, d_opt = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (G, D))
bce = nn.BCEWithLogitsLoss()
for step in range(60):
    x = real[torch.randint(0, 512, (64,))]
    with torch.no_grad():
        fake = G(torch.randn(64, 4))
    d_opt.zero_grad()
    loss = bce(D(x), torch.ones(64, 1)) + bce(D(fake), torch.zeros(64, 1))
    loss.backward()
    d_opt.step()
    g_opt.zero_grad()
    loss = bce(D(G(torch.randn(64, 4))), torch.ones(64, 1))
    loss.backward()
    g_opt.step()
"""),
    _case("VAE", """
data = torch.rand(512, 16).round()
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mu, self.logvar = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.dec = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16), nn.Sigmoid())
    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (logvar / 2).exp()
        return self.dec(z), mu, logvar
model = VAE()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(60):
    x = data[torch.randint(0, 512, (64,))]
    out, mu, logvar = model(x)
    loss = F.binary_cross_entropy(out, x, reduction="sum") / 64 - 0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("diffusion", """
data = torch.randn(512, 2) * 0.3 + 1
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))
model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(80):
    x = data[torch.randint(0, 512, (64,))]
    t = torch.rand(64, 1)
    noise = torch.randn_like(x)
    loss = F.mse_loss(model((1 - t).sqrt() * x + t.sqrt() * noise, t), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
model.eval()
with torch.no_grad():
    x = torch.randn(8, 2)
    for i in range(5):
        x = x - 0.1 * model(x, torch.full((8, 1), 1 - i / 5))
"""),
    _case("autoencoder", """
x = torch.randn(300, 4) @ torch.randn(4, 20)
model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(60):
    loss = F.mse_loss(model(x), x)
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
]  # fmt: skip
