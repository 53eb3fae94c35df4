"""What observing a compiled training step costs: ratios to the step untapped, from interleaved runs in one process.

    python benchmarks/compiled.py [--rounds N] [--steps N] [--threads N] [--layers N] [--backend inductor]

Four copies of the overhead benchmark's transformer, eager and compiled, bare and tapped, take turns. A tapped copy
keeps its taps for the whole time, so nothing is compiled between measurements; it is measured paused (disarmed) and
observed. Exits with 1 when a figure that must be reached is missed, or when results or records differ.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._dynamo
from models import Transformer
from torch import nn

import tensortap as tt
from tensortap.adapters.protocol import leaves

DISARMED = 1.03  # of the bare compiled step
ARMED = 1.10  # of what the same statistics cost in eager mode, in seconds


class Subject(NamedTuple):
    """A copy of the model, how it is run, and its tap."""

    model: nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    tap: tt.Tap | None = None


def subject(model: nn.Module, backend: str, folder: str = "") -> Subject:
    """A copy, compiled unless the backend is empty, tapped if there is a folder."""
    own = copy.deepcopy(model)
    run = torch.compile(own, backend=backend, fullgraph=True) if backend else own
    tap = tt.watch(own, tt.probe(leaves, keep=tt.stats()), to=folder) if folder else None
    return Subject(own, run, torch.optim.SGD(own.parameters(), lr=1e-4), tap)


def step(on: Subject, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """One training step; its seconds."""
    start = time.perf_counter()
    on.optimizer.zero_grad(set_to_none=True)
    logits = on.run(tokens)
    nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets).backward()
    on.optimizer.step()
    if on.tap is not None:
        on.tap.step()
    return time.perf_counter() - start


def paused(on: Subject) -> None:
    """Nothing is observed from the next step on."""
    if on.tap is not None:
        on.tap.pause()


def observed(on: Subject) -> None:
    """Every step is observed from the next one on."""
    if on.tap is not None:
        on.tap.resume()
        on.tap.step()


def measure(subjects: dict[str, Subject], rounds: int, steps: int, batch: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """The median over rounds of the best step of each, taking turns; tapped ones both paused and observed."""
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, on in subjects.items():
            for state, prepare in (("paused", paused), ("observed", observed)) if on.tap else (("bare", paused),):
                prepare(on)
                best = min(step(on, *batch) for _ in range(steps + 1))
                seconds.setdefault(f"{name} {state}", []).append(best)
    return {name: statistics.median(found) for name, found in seconds.items()}


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    """Whether two copies are still equal after equally many steps."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def report(seconds: dict[str, float], exact: bool) -> int:
    """Print; 1 when something is missed."""
    for name, value in seconds.items():
        print(f"  {name:24} {1e3 * value:9.2f} ms")
    disarmed = seconds["compiled tapped paused"] / seconds["compiled bare"]
    eager = seconds["eager tapped observed"] - seconds["eager bare"]
    armed = seconds["compiled tapped observed"] - seconds["compiled bare"]
    print(f"  disarmed                 ×{disarmed:8.3f}   must be ≤ {DISARMED}{'   MISSED' * (disarmed > DISARMED)}")
    print(
        f"  armed statistics         {1e3 * armed:9.2f} ms   eager's {1e3 * eager:.2f} ms, must be ≤ ×{ARMED}"
        f"{'   MISSED' * (armed > ARMED * eager)}"
    )
    print(f"  the same bits after training: {exact}")
    return int(disarmed > DISARMED or armed > ARMED * eager or not exact)


def main() -> int:
    """Print the table; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = Transformer()
    model.blocks = model.blocks[: options.layers]
    batch = torch.randint(5000, (8, 128)), torch.randint(5000, (8 * 128,))
    with tempfile.TemporaryDirectory() as folder:
        subjects = {
            "eager": subject(model, ""),
            "eager tapped": subject(model, "", f"{folder}/eager"),
            "compiled": subject(model, options.backend),
            "compiled tapped": subject(model, options.backend, f"{folder}/compiled"),
        }
        for _ in range(3):  # what the first attached has compiled anew is compiled by now
            for on in subjects.values():
                step(on, *batch)
        exact = same_bits(subjects["compiled"].model, subjects["compiled tapped"].model)
        print(f"{options.layers} layers, {options.backend}:")
        missed = report(measure(subjects, options.rounds, options.steps, batch), exact)
        records = [_records(on.tap) for on in subjects.values() if on.tap is not None]
        print(f"  records, eager and compiled: {records}")
    return missed or int(len(set(records)) != 1)


def _records(tap: tt.Tap) -> int:
    tap.close()
    return len(tap.run.table(columns=["step"]))


if __name__ == "__main__":
    sys.exit(main())
