"""Correct scripts of other kinds: images in plain functions, Keras by `fit` and by a loop, half precision, two ranks."""

from __future__ import annotations

DIGITS = """import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

# no nn.Module: parameters are plain tensors, the network is a function
torch.manual_seed(42)
digits = load_digits()
X = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16.0
X = (X - 0.3) / 0.37
Y = torch.tensor(digits.target)

class ConvNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.k1 = torch.nn.Parameter(torch.randn(8, 1, 3, 3) * (2 / 9) ** 0.5)
        self.b1 = torch.nn.Parameter(torch.zeros(8))
        self.k2 = torch.nn.Parameter(torch.randn(16, 8, 3, 3) * (2 / 72) ** 0.5)
        self.b2 = torch.nn.Parameter(torch.zeros(16))
        self.w = torch.nn.Parameter(torch.randn(10, 64) * (1 / 64) ** 0.5)
        self.b = torch.nn.Parameter(torch.zeros(10))
    def forward(self, x):
        x = F.max_pool2d(F.relu(F.conv2d(x, self.k1, self.b1, padding=1)), 2)
        x = F.max_pool2d(F.relu(F.conv2d(x, self.k2, self.b2, padding=1)), 2)
        x = F.dropout(x, 0.1, training=self.training)
        return F.linear(x.flatten(1), self.w, self.b)

def train_epoch(net, opt):
    net.train()
    for idx in torch.randperm(1500).split(60):
        opt.zero_grad()
        logp = F.log_softmax(net(X[idx]), dim=1)
        loss = F.nll_loss(logp, Y[idx])
        loss.backward()
        opt.step()
    return loss.item()

def test(net):
    net.eval()
    with torch.no_grad():
        return (net(X[1500:]).argmax(1) == Y[1500:]).float().mean().item()

net = ConvNet()
opt = torch.optim.Adagrad(net.parameters(), lr=0.03)
for epoch in range(3):
    print(epoch, train_epoch(net, opt), test(net))
"""

KERAS_LOOP = """import os
os.environ.setdefault("KERAS_BACKEND", "torch")
import keras
import numpy as np
import torch
from sklearn.datasets import load_iris
keras.utils.set_random_seed(0)
x, y = load_iris(return_X_y=True)
x = ((x - x.mean(0)) / x.std(0)).astype("float32")
inputs = keras.Input((4,))
h = keras.layers.Dense(16, activation="relu")(inputs)
h = keras.layers.Dense(16, activation="relu")(h)
outputs = keras.layers.Dense(3)(h)
model = keras.Model(inputs, outputs)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(learning_rate=0.01)
for epoch in range(12):
    order = np.random.permutation(len(x))
    for start in range(0, 150, 30):
        batch = order[start:start + 30]
        logits = model(x[batch], training=True)
        loss = loss_fn(y[batch], logits)
        model.zero_grad()
        loss.backward()
        gradients = [w.value.grad for w in model.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_weights)
    print(epoch, float(loss))
"""

KERAS_FIT = """import os
os.environ.setdefault("KERAS_BACKEND", "torch")
import keras
import numpy as np
from sklearn.datasets import load_digits
keras.utils.set_random_seed(3)
d = load_digits()
x = d.data.astype("float32") / 16
y = keras.utils.to_categorical(d.target, 10)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(48, activation="relu"),
                          keras.layers.BatchNormalization(), keras.layers.Dropout(0.2),
                          keras.layers.Dense(10, activation="softmax")])
model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=3, validation_split=0.2, verbose=0)
print(model.evaluate(x, y, verbose=0))
"""

RANKS = """import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def worker(rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(100 + rank)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        x = torch.randn(32, 8)
        y = x[:, :3].argmax(1)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(worker, args=(2, os.path.abspath("store")), nprocs=2)
"""

HALF = """import torch
from torch import nn
torch.manual_seed(4)
xs = torch.randn(400, 12)
ys = (xs[:, 0] * xs[:, 1] > 0).long()
net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optim = torch.optim.Adam(net.parameters(), lr=2e-3)
def step(i):
    pick = torch.randint(0, 400, (50,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(xs[pick])
    loss = nn.functional.cross_entropy(out.float(), ys[pick])
    optim.zero_grad()
    loss.backward()
    optim.step()
    return loss.item()
print([round(step(i), 3) for i in range(60)][-1])
"""
