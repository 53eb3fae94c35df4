"""A small NumPy network that learns to read digits, with two faults in it that the loss alone does not explain.

`make demo` runs it. The network is trained with plain SGD; `tt.tap(x, "name")` names the values worth seeing, and
`tt.watch` keeps a thin history of all of them, plus every value of the steps around the moment things go wrong.

The two faults, planted where people really make them:
* `up.relu` is dead from the start: the weights before it were drawn from [-a, 0) instead of [-a, a). A skip
  connection carries the signal past it, so the network learns all the same and nobody notices.
* the learning rate is constant until step 150; from there a slip in the schedule (an exponent with a minus sign too
  many) makes it grow instead of decay, until a layer overflows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import tensortap as tt

Array = npt.NDArray[np.float32]
Network = dict[str, Array]

SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
ACROSS, UPPER, LOWER = slice(2, 6), slice(2, 6), slice(7, 11)
STROKES: dict[str, tuple[int | slice, int | slice]] = {
    "a": (1, ACROSS), "b": (UPPER, 6), "c": (LOWER, 6), "d": (11, ACROSS),
    "e": (LOWER, 1), "f": (UPPER, 1), "g": (6, ACROSS),
}  # fmt: skip
BATCH, HIDDEN, CLASSES, PIXELS = 64, 128, 10, 13 * 8


def digits(rng: np.random.Generator) -> Iterator[tuple[Array, npt.NDArray[np.int64]]]:
    """Batches of noisy seven-segment digits, 13 by 8 pixels, without end."""
    glyphs = np.zeros((CLASSES, 13, 8), np.float32)
    for glyph, segments in zip(glyphs, SEGMENTS, strict=True):
        for segment in segments:
            glyph[STROKES[segment]] = 1
    while True:
        labels = rng.integers(CLASSES, size=BATCH)
        noise = rng.normal(0, 0.5, (BATCH, PIXELS)).astype(np.float32)
        yield glyphs[labels].reshape(BATCH, PIXELS) + noise, labels


def initialised(rng: np.random.Generator) -> Network:
    """A stem, a residual block of two layers, a head; biases begin at zero."""

    def layer(name: str, inputs: int, outputs: int, high: float = 1.0) -> Network:
        bound = np.sqrt(6 / inputs)
        weight = rng.uniform(-bound, high * bound, (inputs, outputs)).astype(np.float32)
        return {f"{name}.weight": weight, f"{name}.bias": np.zeros(outputs, np.float32)}

    return {
        **layer("stem", PIXELS, HIDDEN),
        **layer("up", HIDDEN, HIDDEN, high=0.0),  # the first fault: never positive, whatever goes in
        **layer("down", HIDDEN, HIDDEN),
        **layer("head", HIDDEN, CLASSES),
    }


def learning_rate(step: int) -> float:
    """Constant, then decaying."""
    if step < 150:
        return 0.1
    return float(0.1 * 0.8 ** -(step - 150))  # the second fault: 0.8 ** (step - 150) was meant


def linear(net: Network, name: str, x: Array) -> Array:
    """One layer, its output named."""
    return tt.tap(x @ net[f"{name}.weight"] + net[f"{name}.bias"], name)


def train_step(net: Network, x: Array, labels: npt.NDArray[np.int64], rate: float) -> tuple[float, float]:
    """Forward, backward, update: the loss and the accuracy."""
    stem = linear(net, "stem", x)
    relu = tt.tap(np.maximum(stem, 0), "stem.relu")
    up = linear(net, "up", relu)
    inner = tt.tap(np.maximum(up, 0), "up.relu")
    out = tt.tap(relu + linear(net, "down", inner), "block")
    logits = linear(net, "head", out)

    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    loss = float(-np.log(chances[np.arange(BATCH), labels] + 1e-9).mean())

    d_logits = (chances - np.eye(CLASSES, dtype=np.float32)[labels]) / BATCH
    d_out = d_logits @ net["head.weight"].T
    d_up = (d_out @ net["down.weight"].T) * (up > 0)
    d_stem = (d_out + d_up @ net["up.weight"].T) * (stem > 0)
    flows = {"head": (out, d_logits), "down": (inner, d_out), "up": (relu, d_up), "stem": (x, d_stem)}
    for name, (inputs, grad) in flows.items():
        net[f"{name}.weight"] -= np.float32(rate) * tt.tap(inputs.T @ grad, f"grad.{name}")
        net[f"{name}.bias"] -= np.float32(rate) * grad.sum(axis=0)
    return loss, float((logits.argmax(axis=1) == labels).mean())


def train(to: str | None = None, steps: int = 400) -> str:
    """Train until the loss is no number any more; where the run was written."""
    rng = np.random.default_rng(0)
    net, batches = initialised(rng), digits(rng)
    trouble = tt.nonfinite() | tt.spike("loss", window=20, factor=5)
    with (
        np.errstate(all="ignore"),
        tt.watch(
            tt.probe("**", when=tt.every(10)),
            tt.probe("**", keep=[tt.stats(), tt.histogram(), tt.sample(64)], when=trouble),
            lookback=5,
            to=to,
        ) as watching,
    ):
        for step in range(steps):
            loss, accuracy = train_step(net, *next(batches), learning_rate(step))
            watching.step(loss=loss, accuracy=accuracy)
            if step % 30 == 0 or not np.isfinite(loss):
                print(f"  step {step:3d}   loss {loss:7.3f}   accuracy {accuracy:4.0%}")
            if not np.isfinite(loss):
                break
    assert watching.path is not None
    return watching.path


def explain(run: tt.Run) -> None:
    """The two faults, as the run tells them."""
    zeros, sizes = run.series("up.relu", "zeros").values, run.series("up.relu", "numel").values
    print(f"\nFault 1: in up.relu {zeros.sum() / sizes.sum():.0%} of the elements are zero, at every step. It is dead.")
    bad = next(r for r in run.records() if r["nan"] + r["posinf"] + r["neginf"])
    begun = next(r for r in run.records() if "spike" in r["reason"] and "lookback" not in r["reason"])
    print(
        f"Fault 2: the loss jumped at step {begun.step}; the first infinity was in {bad.place} at step {bad.step}.\n"
        f"Nobody had asked for steps {begun.step - 5} to {begun.step - 1}; look-back kept them all the same:"
    )
    tensortap("show", run.path, "--site", str(bad.place), "--step", f"{begun.step - 5}:{begun.step + 2}")


def tensortap(*words: str) -> None:
    """Run a command as one would type it."""
    print(f"\n$ tensortap {' '.join(words)}", flush=True)
    env = os.environ if sys.stdout.isatty() else {**os.environ, "COLUMNS": "100"}
    subprocess.run([sys.executable, "-m", "tensortap", *words], check=True, env=env)


def main() -> None:
    """Train, then look."""
    print("A small network in NumPy learns to read digits. It does well, and then it does not:\n")
    path = train()
    print("\nWhat happened inside, the worst first:")
    tensortap("show", path)
    explain(tt.open_run(path))
    print(
        f"\nThe run is {path}: Parquet that DuckDB, pandas and Polars read without tensortap.\n"
        f"The faults are in {os.path.relpath(__file__)}: look there for “fault”."
    )


if __name__ == "__main__":
    main()
