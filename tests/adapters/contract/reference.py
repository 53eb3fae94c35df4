"""The network that every framework builds for the contract, computed here by hand in NumPy.

    fc1 ─ act ─ blocks.0 ─ act ─ blocks.1 ─ act ─ split ─ tied ─ head

`act` is one layer used three times, `tied` is `blocks.0` under a second name, `split` returns a dict with a tuple in
it: {"left": half, "right": (other half, sums)}.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np

BATCH, GIVEN, WIDTH, OUT = 5, 6, 8, 3
SHAPES = {"fc1": (GIVEN, WIDTH), "blocks.0": (WIDTH, WIDTH), "blocks.1": (WIDTH, WIDTH), "head": (WIDTH, OUT)}
LAYERS = ("fc1", "act", "blocks.0", "blocks.1", "split", "tied", "head")


def weights():
    """Every dense layer's weight (inputs, outputs) and bias, always the same unless one is perturbed."""
    rng = np.random.default_rng(7)
    made = {
        name: (rng.normal(0, 0.5, shape).astype(np.float32), rng.normal(0, 0.1, shape[1]).astype(np.float32))
        for name, shape in SHAPES.items()
    }
    for name in _PERTURBED:
        made[name][0][0] += np.float32(0.01)
    return made


_PERTURBED = []


@contextmanager
def perturbed(layer):
    """Models built inside have a slightly different layer."""
    _PERTURBED.append(layer)
    try:
        yield
    finally:
        _PERTURBED.remove(layer)


def batch(seed=0):
    """A batch of inputs."""
    return np.random.default_rng(seed).normal(size=(BATCH, GIVEN)).astype(np.float32)


def expected(x):
    """What goes into and comes out of every layer: `site:port` with slot to the arrays, one for each call."""
    seen = {}
    w = weights()

    def note(name, port, value):
        seen.setdefault(f"{name}:{port}", []).append(value)
        return value

    def dense(name, x, *others):
        for site in (name, *others):
            note(site, "input", x)
        y = x @ w[name][0] + w[name][1]
        for site in (name, *others):
            note(site, "output", y)
        return y

    def act(x):
        note("act", "input", x)
        return note("act", "output", np.maximum(x, 0))

    note("", "input", x)
    h = act(dense("fc1", x))
    h = act(dense("blocks.0", h, "tied"))
    h = act(dense("blocks.1", h))
    note("split", "input", h)
    half = WIDTH // 2
    left = note("split", "output.left", h[:, :half])
    right = note("split", "output.right[0]", h[:, half:])
    note("split", "output.right[1]", h.sum(axis=1))
    y = dense("blocks.0", np.concatenate([left, right], axis=1), "tied")
    return seen | {":output": [dense("head", y)]} | {key: seen[key] for key in ("head:input", "head:output")}


def gradients(x):
    """For the loss `sum(output ** 2)`: the gradient of the head's output and of its weight."""
    seen = expected(x)
    grad = 2 * seen["head:output"][0]
    return {"head:grad_output": grad, "weight": seen["head:input"][0].T @ grad}
