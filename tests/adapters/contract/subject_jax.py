"""The contract's network in Flax NNX, its steps watched by `watch_step`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import reference
from flax import nnx

import tensortap as tt


class ReLU(nnx.Module):
    def __call__(self, x):
        return jnp.maximum(x, 0)


class Split(nnx.Module):
    def __call__(self, h):
        half = reference.WIDTH // 2
        return {"left": h[:, :half], "right": (h[:, half:], h.sum(1))}


class Net(nnx.Module):
    def __init__(self):
        self.fc1 = dense("fc1")
        self.act = ReLU()
        self.blocks = nnx.List([dense("blocks.0"), dense("blocks.1")])
        self.split = Split()
        self.tied = self.blocks[0]
        self.head = dense("head")

    def __call__(self, x):
        h = self.act(self.fc1(x))
        for block in self.blocks:
            h = self.act(block(h))
        parts = self.split(h)
        return self.head(self.tied(jnp.concatenate([parts["left"], parts["right"][0]], 1)))


def dense(name):
    weight, bias = map(jnp.asarray, reference.weights()[name])
    initial = {"kernel_init": lambda *_: weight, "bias_init": lambda *_: bias}  # drawing numbers is compiled
    return nnx.Linear(*weight.shape, rngs=nnx.Rngs(0), **initial)


def forward(model, x):
    return model(x)


def backward(model, x):
    return nnx.value_and_grad(lambda model: jnp.square(model(x)).sum())(model)


COMPILED = nnx.jit(forward)


class Subject:
    framework = "jax"
    act = "ReLU"
    weight = "head.kernel"

    def __init__(self):
        self.model = Net()
        self.step = COMPILED

    def watch(self, *probes, **options):
        """A tap on top of those there are; the subject calls the function that it gives."""
        self.step = tt.watch_step(self.step, self.model, *probes, **options)
        return self.step.tap

    def arguments(self, x):
        return jnp.asarray(x)

    def array(self, array):
        return np.asarray(array)

    def call(self, x):
        return np.asarray(self.step(self.model, jnp.asarray(x)))

    def fail(self, x):
        self.step(self.model, jnp.asarray(x[:, :-1]))

    def train(self, x):
        self.step.also(backward)(self.model, jnp.asarray(x))

    def parameters(self):
        return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(self.model)))

    def traces(self):
        layers = [module for _, module in nnx.iter_modules(self.model)]
        own = [{n: id(v) for n, v in vars(layer).items() if not n.startswith("_pytree")} for layer in layers]
        return own + [  # NNX's own notes change whenever a model is taken apart
            [base.__dict__.get("__call__") for base in type(layer).__mro__] for layer in layers
        ]
