"""The contract's network in PyTorch."""

from __future__ import annotations

import numpy as np
import reference
import torch
from torch import nn

import tensortap as tt


class Split(nn.Module):
    def forward(self, h):
        half = reference.WIDTH // 2
        return {"left": h[:, :half], "right": (h[:, half:], h.sum(1))}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = dense("fc1")
        self.act = nn.ReLU()
        self.blocks = nn.ModuleList([dense("blocks.0"), dense("blocks.1")])
        self.split = Split()
        self.tied = self.blocks[0]
        self.head = dense("head")
        self.broken = False

    def forward(self, x):
        h = self.act(self.fc1(x))
        for block in self.blocks:
            h = self.act(block(h))
        if self.broken:
            raise ValueError("broken on demand")
        parts = self.split(h)
        return self.head(self.tied(torch.cat([parts["left"], parts["right"][0]], 1)))


def dense(name):
    weight, bias = map(torch.from_numpy, reference.weights()[name])
    layer = nn.Linear(*weight.shape)
    layer.weight.data, layer.bias.data = weight.T.contiguous(), bias
    return layer


class Subject:
    framework = "torch"
    act = "ReLU"
    weight = "head.weight"

    def __init__(self):
        self.model = Net()

    def watch(self, *probes, **options):
        return tt.watch(self.model, *probes, **options)

    def arguments(self, x):
        """What `capture`, `verify` and `compare` are given."""
        return torch.from_numpy(x)

    def array(self, tensor):
        return tensor.detach().numpy()

    def call(self, x):
        return self.array(self.model(torch.from_numpy(x)))

    def fail(self, x):
        """A call that raises inside the model."""
        self.model.broken = True
        try:
            self.call(x)
        finally:
            self.model.broken = False

    def train(self, x):
        """Forward and backward with the loss sum(output ** 2)."""
        self.model.zero_grad()
        self.model(torch.from_numpy(x)).square().sum().backward()

    def parameters(self):
        """All that is learnt, as bytes."""
        return b"".join(np.ascontiguousarray(p.detach().numpy()).tobytes() for p in self.model.parameters())

    def traces(self):
        """Everything a careless tap could leave behind."""
        return {
            (path, name): list(value) if isinstance(value, dict) else value
            for path, module in self.model.named_modules()
            for name, value in vars(module).items()
        }
