"""The contract's network in plain NumPy."""

from __future__ import annotations

import numpy as np
import reference

import tensortap as tt


class Dense:
    def __init__(self, name):
        self.weight, self.bias = reference.weights()[name]

    def __call__(self, x):
        return self.forward(x)

    def forward(self, x):
        return x @ self.weight + self.bias


class ReLU:
    def __call__(self, x):
        return np.maximum(x, 0)


class Split:
    def forward(self, h):
        half = reference.WIDTH // 2
        return {"left": h[:, :half], "right": (h[:, half:], h.sum(axis=1))}


class Net:
    def __init__(self):
        self.fc1 = Dense("fc1")
        self.act = ReLU()
        self.blocks = [Dense("blocks.0"), Dense("blocks.1")]
        self.split = Split()
        self.tied = self.blocks[0]
        self.head = Dense("head")
        self.broken = False

    def __call__(self, x):
        h = self.act(self.fc1(x))
        for block in self.blocks:
            h = self.act(block(h))
        if self.broken:
            raise ValueError("broken on demand")
        parts = self.split.forward(h)
        return self.head(self.tied(np.concatenate([parts["left"], parts["right"][0]], axis=1)))


class Subject:
    framework = "numpy"
    act = "ReLU"
    weight = "head.weight"

    def __init__(self):
        self.model = Net()

    def watch(self, *probes, **options):
        return tt.watch(self.model, *probes, **options)

    def arguments(self, x):
        return x

    def array(self, array):
        return array

    def call(self, x):
        return self.model(x)

    def fail(self, x):
        self.model.broken = True
        try:
            self.call(x)
        finally:
            self.model.broken = False

    def layers(self):
        model = self.model
        return [model, model.fc1, model.act, *model.blocks, model.split, model.head]

    def parameters(self):
        return b"".join(v.tobytes() for layer in self.layers() for v in vars(layer).values() if hasattr(v, "tobytes"))

    def traces(self):
        classes = {type(layer) for layer in self.layers()}
        return [[*vars(thing).items()] for thing in (*sorted(classes, key=str), *self.layers()[:1])] + [
            {name: id(value) for name, value in vars(layer).items()} for layer in self.layers()
        ]
