"""Reinforcement learning, adversarial and meta-learning, without a fault."""

from __future__ import annotations

from outside.faults.healthy.case import with_head as _case

TRAININGS = [
    _case("policy gradient", """
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(30):
    states = torch.randn(24, 4)
    dist = torch.distributions.Categorical(logits=policy(states))
    action = dist.sample()
    reward = ((states[:, 0] > 0).long() == action).float()
    loss = -(dist.log_prob(action) * (reward - reward.mean())).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    _case("DQN with a target network", """
q = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
target = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
target.load_state_dict(q.state_dict())
opt = torch.optim.Adam(q.parameters(), lr=1e-3)
for step in range(60):
    s, s2, a = torch.randn(32, 4), torch.randn(32, 4), torch.randint(0, 3, (32, 1))
    r = (s[:, :1] > 0).float()
    with torch.no_grad():
        goal = r + 0.9 * target(s2).max(1, keepdim=True).values
    loss = F.smooth_l1_loss(q(s).gather(1, a), goal)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 19:
        target.load_state_dict(q.state_dict())
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
]  # fmt: skip
