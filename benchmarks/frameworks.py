"""What observing costs in each framework: statistics of every layer at every step, against the bare step.

    python benchmarks/frameworks.py [--only NAME] [--rounds N] [--steps N]

An entry is a function that makes a `Subject`: one bare step, and a way to watch it. Frameworks that are not installed
are passed over. Exits with 1 when a figure that must be reached is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import tensortap as tt
from tensortap.watch import leaves

LONG_ENOUGH = 0.020  # seconds: what a step must take for the figures to mean anything


class Subject(NamedTuple):
    """A model: a step of it, and a context in which a function runs an observed step."""

    step: Callable[[], Any]
    watched: Callable[[str], contextlib.AbstractContextManager[Callable[[], Any]]]
    steps: int = 1  # how many steps of training one call takes


class Entry(NamedTuple):
    """One line of the table: the ratio that must be reached, and who makes the subject."""

    limit: float
    make: Callable[[], Subject]


def watching(model: Any, step: Callable[[], Any]) -> Subject:
    """The subject for models that `tt.watch` takes as they are, whose steps find themselves."""

    @contextlib.contextmanager
    def watched(folder: str) -> Iterator[Callable[[], Any]]:
        with tt.watch(model, tt.probe(leaves, keep=tt.stats()), to=folder) as tap:

            def observed() -> None:
                step()
                tap.step()

            yield observed

    return Subject(step, watched)


def numpy_mlp() -> Subject:
    """Eight dense layers with activations, in objects of NumPy."""
    rng = np.random.default_rng(0)

    class Dense:
        def __init__(self) -> None:
            self.weight = rng.normal(0, 0.03, (1024, 1024)).astype(np.float32)

        def __call__(self, x: Any) -> Any:
            return x @ self.weight

    class Net:
        def __init__(self) -> None:
            self.layers = [Dense() if i % 2 == 0 else Relu() for i in range(16)]

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    class Relu:
        def __call__(self, x: Any) -> Any:
            return np.maximum(x, 0)

    model, x = Net(), rng.normal(size=(256, 1024)).astype(np.float32)
    return watching(model, lambda: model(x))


def onnx_cnn() -> Subject:
    """Eight convolutions with activations in a session of ONNX Runtime, every tensor of the optimised graph."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    nodes, constants, given = [], [], "x"
    for i in range(8):
        weight = rng.normal(0, 0.06, (64, 64, 3, 3)).astype(np.float32)
        constants.append(numpy_helper.from_array(weight, f"conv{i}.weight"))
        nodes.append(helper.make_node("Conv", [given, f"conv{i}.weight"], [f"conv{i}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"conv{i}"], [f"relu{i}"]))
        given = f"relu{i}"
    shape = [4, 64, 48, 48]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", given)]
    graph = helper.make_graph(nodes, "cnn", ends[:1], ends[1:], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"x": rng.normal(size=shape).astype(np.float32)}
    return watching(session, lambda: session.run(None, feed))


def jax_transformer(callbacks: bool = False) -> Subject:
    """A training step of two blocks of a transformer in Flax NNX, compiled, with every leaf's output watched."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm = nnx.LayerNorm(256, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(8, 256, decode=False, rngs=rngs)
            self.up = nnx.Linear(256, 1024, rngs=rngs)
            self.down = nnx.Linear(1024, 256, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norm(x))
            return x + self.down(jax.nn.gelu(self.up(x)))

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.head = nnx.Linear(256, 64, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64, 256)), jnp.float32)

    @nnx.jit
    def train(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
        optimizer.update(model, gradient)
        return loss

    def bare() -> float:
        return float(train(model, optimizer, x))

    if callbacks:
        return watching(model, bare)

    @contextlib.contextmanager
    def watched(folder: str) -> Iterator[Callable[[], Any]]:
        with tt.watch_step(train, model, tt.probe(leaves, keep=tt.stats()), to=folder) as step:
            yield lambda: step.tap.step(loss=step(model, optimizer, x))

    return Subject(bare, watched)


def keras_fit() -> Subject:
    """Eight dense layers with activations in a Keras model on TensorFlow, trained by `fit`: a step is a batch."""
    import os

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    keras.utils.set_random_seed(0)
    layers = [each for _ in range(8) for each in (keras.layers.Dense(1024), keras.layers.ReLU())]
    model = keras.Sequential([keras.Input((1024,)), *layers])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(8 * 256, 1024)).astype(np.float32)

    def epoch() -> None:  # eight steps, for `fit` itself takes its time to begin
        model.fit(x, x, batch_size=256, verbose=0, shuffle=False)

    @contextlib.contextmanager
    def watched(folder: str) -> Iterator[Callable[[], Any]]:
        with tt.watch(model, tt.probe(leaves, keep=tt.stats()), to=folder):
            yield epoch

    return Subject(epoch, watched, steps=8)


ENTRIES = {
    "jax": Entry(1.10, jax_transformer),
    "jax-callbacks": Entry(math.inf, functools.partial(jax_transformer, callbacks=True)),
    "keras": Entry(1.10, keras_fit),
    "numpy": Entry(1.05, numpy_mlp),
    "onnxruntime": Entry(1.15, onnx_cnn),
}


def measure(subject: Subject, rounds: int, steps: int) -> tuple[float, float]:
    """The bare step in seconds, and the median over rounds of observed over bare, in turn within a round."""
    ratios, bare = [], []
    subject.step()
    for _ in range(rounds):
        gc.collect()
        bare.append(min(_timed(subject.step) for _ in range(steps)))
        with tempfile.TemporaryDirectory() as folder, subject.watched(f"{folder}/run") as observed:
            observed()  # the first may build or trace something
            ratios.append(min(_timed(observed) for _ in range(steps)) / bare[-1])
    return min(bare) / subject.steps, statistics.median(ratios)


def _timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> int:
    """Print the table; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=[*ENTRIES], action="append")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    missed = 0
    for name in options.only or ENTRIES:
        try:
            subject = ENTRIES[name].make()
        except ImportError as error:
            print(f"  {name:14} passed over: {error}")
            continue
        bare, ratio = measure(subject, options.rounds, options.steps)
        late = ratio > ENTRIES[name].limit
        missed += late
        short = "   (a step this short says little)" * (bare < LONG_ENOUGH)
        must = "for comparison" if ENTRIES[name].limit == math.inf else f"must be ≤ {ENTRIES[name].limit:.2f}"
        said = f"{must}{'   MISSED' * late}{short}"
        print(f"  {name:14} bare {1e3 * bare:6.1f} ms   ×{ratio:6.3f}   {said}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
