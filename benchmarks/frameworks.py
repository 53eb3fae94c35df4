"""What observing costs in each framework: statistics of every layer at every step, against the bare step.

    python benchmarks/frameworks.py [--only NAME] [--rounds N] [--steps N]

An entry is a function that makes a `Subject`: bare steps, and a way to watch them. Frameworks that are not installed
are passed over. In a round steps are taken bare and then observed; the figure is the median over rounds of the ratio of
their medians, and beside it stand the smallest and the largest. Exits with 1 when a figure that must be reached is
missed.

Subjects do what such models usually do for one element of a tensor. Two more stand for those that do little, where
reading every tensor once is itself a large part of the step: `numpy-dense`, for which summing each output once
(`numpy-dense-sum`) is the floor, and `onnxruntime-mobile`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tensortap as tt
from tensortap.adapters.protocol import leaves

LONG_ENOUGH = 0.020  # seconds: what a step must take for the figures to mean anything
WARM_UP = 3


Steps = Callable[[int], list[float]]  # takes so many steps, and gives the seconds of each


class Subject(NamedTuple):
    """A model: steps of it, and a context in which they are observed."""

    bare: Steps
    watched: Callable[[str], contextlib.AbstractContextManager[Steps]]


class Entry(NamedTuple):
    """One line of the table: the ratio that must be reached, and who makes the subject."""

    limit: float
    make: Callable[[], Subject]


def watching(model: Any, step: Callable[[], Any]) -> Subject:
    """The subject for models that `tt.watch` takes as they are, whose steps find themselves."""

    @contextlib.contextmanager
    def watched(folder: str) -> Iterator[Steps]:
        with tt.watch(model, tt.probe(leaves, keep=tt.stats()), to=folder) as tap:
            yield timed(lambda: (step(), tap.step()))

    return Subject(timed(step), watched)


def timed(step: Callable[[], Any]) -> Steps:
    """A step, taken any number of times."""

    def steps(number: int) -> list[float]:
        ends = [time.perf_counter()]
        for _ in range(number):
            step()
            ends.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(ends)]

    return steps


def numpy_cnn() -> Subject:
    """The convolutional network of examples/numpy_cnn.py in inference: convolutions, activations, pooling, dense."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import numpy_cnn as example

    rng = np.random.default_rng(0)
    model, x = example.Network(rng), np.concatenate([example.pictures(rng) for _ in range(16)])
    return watching(model, lambda: model(x))


def numpy_dense(sums: bool = False) -> Subject:
    """Eight dense layers with activations, in objects of NumPy; with `sums` outputs are summed, not watched."""
    rng = np.random.default_rng(0)

    class Dense:
        def __init__(self) -> None:
            self.weight = rng.normal(0, 0.03, (1024, 1024)).astype(np.float32)

        def __call__(self, x: Any) -> Any:
            return x @ self.weight

    class Net:
        def __init__(self) -> None:
            self.layers = [Dense() if i % 2 == 0 else Relu() for i in range(16)]

        def __call__(self, x: Any, see: Callable[[Any], Any] = id) -> Any:
            for layer in self.layers:
                x = layer(x)
                see(x)
            return x

    class Relu:
        def __call__(self, x: Any) -> Any:
            return np.maximum(x, 0)

    model, x = Net(), rng.normal(size=(256, 1024)).astype(np.float32)
    if sums:
        return Subject(timed(lambda: model(x)), lambda folder: contextlib.nullcontext(timed(lambda: model(x, np.sum))))
    return watching(model, lambda: model(x))


def onnx_resnet() -> Subject:
    """ResNet-18, its normalisations folded in, in a session of ONNX Runtime: every tensor of the optimised graph."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    nodes: list[Any] = []
    constants: list[Any] = []

    def node(kind: str, given: list[str], **attributes: Any) -> str:
        name = f"{kind.lower()}{len(nodes)}"
        nodes.append(helper.make_node(kind, given, [name], **attributes))
        return name

    def weight(*shape: int) -> str:
        scale = (2 / np.prod(shape[1:])) ** 0.5
        constants.append(numpy_helper.from_array(rng.normal(0, scale, shape).astype(np.float32), f"w{len(constants)}"))
        return str(constants[-1].name)

    def convolution(x: str, given: int, gives: int, size: int = 3, stride: int = 1) -> str:
        inputs = [x, weight(gives, given, size, size), weight(gives)]
        return node("Conv", inputs, strides=[stride] * 2, pads=[size // 2] * 4)

    def block(x: str, given: int, gives: int, stride: int) -> str:
        inner = node("Relu", [convolution(x, given, gives, stride=stride)])
        skip = x if given == gives else convolution(x, given, gives, 1, stride)
        return node("Relu", [node("Add", [convolution(inner, gives, gives), skip])])

    x = node("Relu", [convolution("x", 3, 64, 7, 2)])
    x = node("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for given, gives, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        x = block(block(x, given, gives, stride), gives, gives, 1)
    y = node("Gemm", [node("Flatten", [node("GlobalAveragePool", [x])]), weight(512, 1000)])
    shapes = {"x": [4, 3, 224, 224], y: [4, 1000]}
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "resnet", ends[:1], ends[1:], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"x": rng.normal(size=shapes["x"]).astype(np.float32)}
    return watching(session, lambda: session.run(None, feed))


def onnx_mobile() -> Subject:
    """The detector of text that rapidocr-onnxruntime carries, made for phones: 307 tensors, little arithmetic."""
    import onnxruntime

    found = importlib.util.find_spec("rapidocr_onnxruntime")  # only its files: it needs OpenCV to be imported
    if found is None or found.origin is None:
        raise ImportError("rapidocr-onnxruntime is not installed")
    path = Path(found.origin).parent / "models" / "ch_PP-OCRv4_det_infer.onnx"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"x": np.random.default_rng(0).normal(size=(1, 3, 640, 640)).astype(np.float32)}
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
    def watched(folder: str) -> Iterator[Steps]:
        with tt.watch_step(train, model, tt.probe(leaves, keep=tt.stats()), to=folder) as step:
            yield timed(lambda: step.tap.step(loss=step(model, optimizer, x)))

    return Subject(timed(bare), watched)


def keras_fit() -> Subject:
    """Eight dense layers with activations in a Keras model on TensorFlow, trained by `fit`: a step is a batch."""
    import os

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    keras.utils.set_random_seed(0)
    layers = [each for _ in range(8) for each in (keras.layers.Dense(1024), keras.layers.ReLU())]
    model = keras.Sequential([keras.Input((1024,)), *layers])
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.times.append(-time.perf_counter())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times[-1] += time.perf_counter()

    def epoch(steps: int) -> list[float]:  # by the batch: `fit` takes its time to begin, and at times to end
        x, clock = rng.normal(size=(steps * 256, 1024)).astype(np.float32), Clock()
        model.fit(x, x, batch_size=256, verbose=0, shuffle=False, callbacks=[clock])
        return clock.times

    @contextlib.contextmanager
    def watched(folder: str) -> Iterator[Steps]:
        with tt.watch(model, tt.probe(leaves, keep=tt.stats()), to=folder):
            yield epoch

    return Subject(epoch, watched)


ENTRIES = {
    "jax": Entry(1.10, jax_transformer),
    "jax-callbacks": Entry(math.inf, functools.partial(jax_transformer, callbacks=True)),
    "keras": Entry(1.10, keras_fit),
    "numpy": Entry(1.05, numpy_cnn),
    "numpy-dense": Entry(math.inf, numpy_dense),
    "numpy-dense-sum": Entry(math.inf, functools.partial(numpy_dense, sums=True)),
    "onnxruntime": Entry(1.15, onnx_resnet),
    "onnxruntime-mobile": Entry(math.inf, onnx_mobile),
}


class Measured(NamedTuple):
    """The bare step in seconds, and observed over bare: the median over rounds, the smallest, the largest."""

    bare: float
    ratio: float
    least: float
    most: float


def measure(subject: Subject, rounds: int, steps: int) -> Measured:
    """Bare and observed steps in turn."""
    ratios, bare = [], []
    subject.bare(WARM_UP)
    for _ in range(rounds):
        gc.collect()
        bare.append(statistics.median(subject.bare(steps)))
        with tempfile.TemporaryDirectory() as folder, subject.watched(f"{folder}/run") as observed:
            observed(WARM_UP)  # the first may build or trace something
            ratios.append(statistics.median(observed(steps)) / bare[-1])
    return Measured(statistics.median(bare), statistics.median(ratios), min(ratios), max(ratios))


def main() -> int:
    """Print the table; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=[*ENTRIES], action="append")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    missed = 0
    for name in options.only or ENTRIES:
        try:
            subject = ENTRIES[name].make()
        except ImportError as error:
            print(f"  {name:18} passed over: {error}")
            continue
        bare, ratio, least, most = measure(subject, options.rounds, options.steps)
        late = ratio > ENTRIES[name].limit
        missed += late
        short = "   (a step this short says little)" * (bare < LONG_ENOUGH)
        must = "for comparison" if ENTRIES[name].limit == math.inf else f"must be ≤ {ENTRIES[name].limit:.2f}"
        said = f"{must}{'   MISSED' * late}{short}"
        print(
            f"  {name:18} bare {1e3 * bare:6.1f} ms   ×{ratio:6.3f}   ({least:.3f} to {most:.3f})   {said}", flush=True
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
