"""Keras models in loops of their authors' own, and policies whose sign is lost: programs as people post them."""

from __future__ import annotations

from outside.faults.case import Pair

STUCK = ("loss_not_decreasing", "loss_at_chance")

CUSTOM = """import os
os.environ.setdefault("KERAS_BACKEND", "torch")
import numpy as np
import keras
import torch
from keras import layers
keras.utils.set_random_seed(3)
X = np.random.normal(size=(640, 6)).astype('float32')
Y = (X[:, 0] * 2 - X[:, 1] ** 2).astype('float32')
model = keras.Sequential([keras.Input((6,)), layers.Dense(32, activation='relu'), layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(1)])
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y)), 32, shuffle=True)
for epoch in range(4):
    for x, y in loader:
        pred = model(x, training=True)
        loss = torch.mean((pred - y[:, None]) ** 2)
        model.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, float(loss))
"""

ON_BATCHES = """import os
os.environ.setdefault("KERAS_BACKEND", "torch")
import numpy as np
import keras
from keras import layers
from sklearn.datasets import load_digits
keras.utils.set_random_seed(1)
x, y = load_digits(return_X_y=True)
x = (x / 16).astype('float32')
net = keras.Sequential([keras.Input((64,)), layers.Dense(32, activation='relu'), layers.Dense(10)])
net.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
for epoch in range(3):
    for i in range(0, 1600, 32):
        loss = net.train_on_batch(x[i:i + 32], y[i:i + 32])
    print(epoch, loss)
"""

EPISODES = """import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical

torch.manual_seed(0)


class Walk:
    # walk on a line, reach the right end
    def reset(self):
        self.at, self.t = 3, 0
        return self.state()

    def state(self):
        s = torch.zeros(8)
        s[self.at] = 1
        return s

    def step(self, action):
        self.at = min(7, max(0, self.at + (1 if action == 1 else -1)))
        self.t += 1
        done = self.at == 7 or self.t >= 12
        return self.state(), (1.0 if self.at == 7 else -0.1), done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(8, 24)
        self.affine2 = nn.Linear(24, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return torch.softmax(self.affine2(torch.relu(self.affine1(x))), dim=-1)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
env = Walk()


def finish_episode():
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + 0.95 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_loss = []
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    loss = torch.stack(policy_loss).sum()
    loss.backward()
    optimizer.step()
    del policy.rewards[:], policy.saved_log_probs[:]


for episode in range(60):
    state, done = env.reset(), False
    while not done:
        m = Categorical(policy(state))
        action = m.sample()
        policy.saved_log_probs.append(m.log_prob(action))
        state, reward, done = env.step(action.item())
        policy.rewards.append(reward)
    finish_episode()
"""

ACTOR_CRITIC = """import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(5)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 32)
        self.pi = nn.Linear(32, 4)
        self.v = nn.Linear(32, 1)

    def forward(self, s):
        h = torch.tanh(self.body(s))
        return F.log_softmax(self.pi(h), dim=-1), self.v(h).squeeze(-1)


net = ActorCritic()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for update in range(80):
    states = torch.randn(48, 5)
    log_probs, values = net(states)
    actions = torch.multinomial(log_probs.exp().detach(), 1)
    rewards = (actions.squeeze(1) == states[:, :4].argmax(1)).float()
    advantage = rewards - values
    actor_loss = -(log_probs.gather(1, actions).squeeze(1) * advantage.detach()).mean()
    critic_loss = advantage.pow(2).mean()
    entropy = -(log_probs.exp() * log_probs).sum(1).mean()
    loss = actor_loss + 0.5 * critic_loss - 0.01 * entropy
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

GAUSSIAN = """import torch
import torch.nn as nn

torch.manual_seed(2)
mean = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))
log_std = nn.Parameter(torch.zeros(1))
optimizer = torch.optim.Adam([*mean.parameters(), log_std], lr=3e-3)
baseline = 0.0
for it in range(120):
    obs = torch.rand(64, 3) * 2 - 1
    dist = torch.distributions.Normal(mean(obs), log_std.exp())
    act = dist.sample()
    reward = -(act - obs.sum(1, keepdim=True)).pow(2)
    advantages = reward - baseline
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    logp = dist.log_prob(act)
    loss = -torch.mean(logp * advantages)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

SAMPLER = """import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29631")
dist.init_process_group("gloo", rank=0, world_size=1)
torch.manual_seed(0)
x = torch.randn(512, 10)
data = TensorDataset(x, (x[:, :2].sum(1, keepdim=True)).tanh())
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
"""

SAMPLER_MADE_EACH_EPOCH = """import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Rows(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.rows = torch.randn(n, 6, generator=g)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return row, row[:1] * row[1:2]


def train_one_epoch(model, optimizer, dataset, epoch, rank, world):
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True)
    sampler.set_epoch(epoch)
    for batch in DataLoader(dataset, batch_size=20, sampler=sampler):
        inputs, targets = batch
        optimizer.zero_grad()
        loss = (model(inputs) - targets).pow(2).mean()
        loss.backward()
        optimizer.step()
    return loss.item()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = Rows(400)
for epoch in range(5):
    print(epoch, train_one_epoch(model, optimizer, rows, epoch, 0, 2))
"""

PAIRS = [
    Pair("keras question: a loop that does not train its normalisation", "tensorflow 31184",
         "mode, dropout, batch norm", CUSTOM, (("model(x, training=True)", "model(x, training=False)"),),
         "trained_in_eval_mode", "model(x, training", ()),
    Pair("keras question: a loop without the column", "tensorflow 28901", "loss", CUSTOM,
         (("y[:, None]", "y"),), "loss_broadcast", "torch.mean((pred - y", STUCK),
    Pair("keras question: gradients never cleared in a loop", "StackOverflow", "training loop", CUSTOM,
         (("        model.zero_grad()\n", ""),), "gradients_not_reset", "loss.backward()", ("loss_spike", *STUCK)),
    Pair("keras question: batches by hand, always the same", "StackOverflow", "data", ON_BATCHES,
         (("net.train_on_batch(x[i:i + 32], y[i:i + 32])", "net.train_on_batch(x[0:32], y[0:32])"),),
         "batches_repeated", "net.train_on_batch(", ()),
    Pair("keras question: batches by hand at 1e-6", "SO 34311586", "learning rate and optimizer", ON_BATCHES,
         (("SGD(0.1)", "SGD(1e-6)"),), "learning_rate_low", "SGD(1e-6)", ("update_ratio", *STUCK)),
    Pair("question: sign lost over an episode", "PyTorch forum", "training loop", EPISODES,
         (("-log_prob * R", "log_prob * R"),), "loss_negated", "policy_loss.append(log_prob * R)", STUCK),
    Pair("question: an actor that avoids rewards", "PyTorch forum", "training loop", ACTOR_CRITIC,
         (("actor_loss = -(log_probs", "actor_loss = (log_probs"),), "loss_negated", "actor_loss = (", STUCK),
    Pair("question: a Gaussian policy that avoids rewards", "PyTorch forum", "training loop", GAUSSIAN,
         (("loss = -torch.mean", "loss = torch.mean"),), "loss_negated", "loss = torch.mean", STUCK),
    Pair("question: the sampler is not told the epoch", "StackOverflow", "data", SAMPLER,
         (("    sampler.set_epoch(epoch)\n", ""),), "order_repeated", "for xb, yb in loader", (),),
    Pair("question: a sampler made in each epoch", "PyTorch forum", "data", SAMPLER_MADE_EACH_EPOCH,
         (("    sampler.set_epoch(epoch)\n", ""),), "order_repeated", "in DataLoader(dataset", ()),
]  # fmt: skip
