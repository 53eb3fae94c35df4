"""A convolutional network in pure NumPy, looked into while it infers. Its layers know nothing of that.

Convolution, ReLU, pooling and a dense layer classify small pictures of shapes. The layers ReLU_1, MaxPool_2 and FC_1
are tapped: statistics and histograms of every batch, the whole logits of every tenth, and one picture's feature maps
as arrays.

    python examples/numpy_cnn.py [--batches N]
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

import tensortap as tt

Array = npt.NDArray[np.float32]
SHAPES = ("square", "cross", "ring", "stripes")
SIZE, BATCH = 24, 16


class Convolution:
    """3 × 3, padded so that the size stays."""

    def __init__(self, rng: np.random.Generator, given: int, gives: int) -> None:
        self.weight = rng.normal(0, np.sqrt(2 / (9 * given)), (gives, given, 3, 3)).astype(np.float32)
        self.bias = np.zeros(gives, np.float32)

    def __call__(self, x: Array) -> Array:
        """Every window times every filter."""
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = sliding_window_view(padded, (3, 3), axis=(2, 3))
        out = np.tensordot(windows, self.weight, axes=((1, 4, 5), (1, 2, 3)))
        return np.ascontiguousarray(out.transpose(0, 3, 1, 2)) + self.bias[:, None, None]


class ReLU:
    """What is positive."""

    def __call__(self, x: Array) -> Array:
        """Element by element."""
        return np.maximum(x, 0)


class MaxPool:
    """The largest of 2 × 2."""

    def __call__(self, x: Array) -> Array:
        """A quarter of the size."""
        n, c, h, w = x.shape
        largest: Array = x.reshape(n, c, h // 2, 2, w // 2, 2).max(axis=(3, 5))
        return largest


class Dense:
    """A matrix and a bias, for flattened pictures."""

    def __init__(self, rng: np.random.Generator, given: int, gives: int) -> None:
        self.weight = rng.normal(0, np.sqrt(1 / given), (given, gives)).astype(np.float32)
        self.bias = np.zeros(gives, np.float32)

    def __call__(self, x: Array) -> Array:
        """One row a picture."""
        return x.reshape(len(x), -1) @ self.weight + self.bias


class Network:
    """Layers by name, one after the other."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.Conv_1, self.ReLU_1, self.MaxPool_1 = Convolution(rng, 1, 8), ReLU(), MaxPool()
        self.Conv_2, self.ReLU_2, self.MaxPool_2 = Convolution(rng, 8, 16), ReLU(), MaxPool()
        self.FC_1 = Dense(rng, 16 * (SIZE // 4) ** 2, len(SHAPES))

    def __call__(self, x: Array) -> Array:
        """A score for every shape."""
        for layer in vars(self).values():
            x = layer(x)
        return x


def pictures(rng: np.random.Generator) -> Array:
    """A batch of noisy shapes."""
    y, x = np.mgrid[:SIZE, :SIZE] - SIZE // 2
    kinds = {
        "square": (abs(x) < 8) & (abs(y) < 8),
        "cross": (abs(x) < 3) | (abs(y) < 3),
        "ring": abs(np.hypot(x, y) - 8) < 2,
        "stripes": x % 6 < 3,
    }
    drawn = np.stack([kinds[shape] for shape in rng.choice(SHAPES, BATCH)])
    return (drawn + rng.normal(0, 0.2, drawn.shape)).astype(np.float32)[:, None]


def infer(network: Network, rng: np.random.Generator, batches: int, to: str | None) -> tt.Run:
    """Classify some batches with taps on three layers; a call of the network is a step."""
    chosen = ("ReLU_1", "MaxPool_2", "FC_1")
    logits = tt.probe("FC_1", keep=tt.full(), when=tt.every(10))
    with tt.watch(network, tt.probe(*chosen), logits, to=to) as tap:
        for _ in range(batches):
            network(pictures(rng))
    return tap.run


def main() -> None:
    """Infer, then look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--to", help="the run's folder (default: a new one under runs/)")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    network = Network(rng)
    run = infer(network, rng, options.batches, options.to)
    print(f"{len(run.steps)} batches\n\nlayer       shape           mean     std    zeros  histogram")
    for record in (r for r in run.records() if r.step == run.last_step):
        shape = "×".join(map(str, record["shape"]))
        zeros = record["zeros"] / record["numel"]
        print(f"{record.place.site:<11} {shape:<13} {record['mean']:6.3f}  {record['std']:6.3f}   {zeros:5.0%}  "
              f"{record.summary.bars(12)}")  # fmt: skip
    maps = tt.capture(network, pictures(rng)[:1], "ReLU_1")["ReLU_1"]
    busiest = int(maps[0].mean(axis=(1, 2)).argmax())
    print(f"\nThe busiest of {maps.shape[1]} feature maps of ReLU_1, for one picture:\n")
    for row in maps[0, busiest, ::2] / maps[0, busiest].max():
        print("  " + "".join(" ·:+#"[int(4.99 * value)] for value in row))
    print(f"\nThe run is {run.path}: tensortap show {run.path}")


if __name__ == "__main__":
    main()
