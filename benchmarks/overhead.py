"""What observing costs, for every port, model and mode: ratios to the bare step, from interleaved pairs.

    python benchmarks/overhead.py [--model NAME]… [--mode train|infer]… [--what NAME]… [--pairs N] [--clock wall|cpu]

A pair is one step of the observed model and one of a copy that nothing hangs on. Printed are the median ratio and the
quartiles of the pairs. Floors (an empty hook, one `sum` in a hook, an empty function mode, a loop over `.grad`, bytes
that are appended as they are, and others) stand in the same table. `--clock cpu` counts the processor's time of this
process, all threads of it: for a machine that other work shares. Exits with 1 when a figure that must be reached is
missed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from models import Workload, workload
from overhead_ways import STRETCHES, TRAINING_ONLY, WAYS, Way
from torch import nn

import tensortap as tt

MODELS: Final = ("transformer", "resnet", "tiny", "blocks")
MODES: Final = ("train", "infer")
CLOCKS: Final[dict[str, Callable[[], float]]] = {"wall": time.perf_counter, "cpu": time.process_time}
# (model, mode, what): the ratio that must be reached.
LIMITS: Final = {
    ("tiny", "train", "outputs"): 1.10,
    ("tiny", "infer", "outputs"): 1.70,
    ("tiny", "train", "outputs + histogram"): 1.18,
    ("tiny", "train", "grad + histogram"): 1.25,
    ("tiny", "train", "update"): 1.35,
    ("tiny", "train", "grad_output"): 1.35,
    ("tiny", "train", "op:@matmul"): 1.20,
    ("tiny", "infer", "four whole tensors"): 1.25,
    ("blocks", "train", "grad"): 1.30,
    ("tiny", "train", "tensortap run"): 1.10,
    ("transformer", "train", "tensortap run"): 1.03,
    ("resnet", "train", "tensortap run"): 1.03,
    ("transformer", "train", "leaves and parameters + hash"): 1.05,
}
ATTACH_LIMIT: Final = 0.4  # seconds for 2 000 blocks
ATTACH_LINE: Final = "attaching the default taps"


class Spread(NamedTuple):
    """The median of the pairs' ratios, and their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"×{self.median:6.3f}  [{self.low:.3f} to {self.high:.3f}]"


class Pair(NamedTuple):
    """An observed model and a copy of it that is left alone."""

    load: Workload
    observed: nn.Module
    alone: nn.Module
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]
    clock: Callable[[], float]

    def ratio(self, way: Way, mode: str, pairs: int, steps: int = 1) -> Spread:
        """Run both in turn, a step of each; a ratio is that of so many steps."""
        ratios = []
        with way(self.observed) as close:
            for number in range(pairs + 2):
                watched = bare = 0.0
                for _ in range(steps):
                    watched += self._timed(0, mode, close)
                    bare += self._timed(1, mode, lambda _: None)
                if number >= 2:
                    ratios.append(watched / bare)
        low, median, high = statistics.quantiles(ratios, n=4)
        return Spread(median, low, high)

    def _timed(self, which: int, mode: str, close: Callable[[nn.Module], None]) -> float:
        model = (self.observed, self.alone)[which]
        begin = self.clock()
        if mode == "infer":
            with torch.no_grad():
                self.load.loss(model)
        else:
            self.optimizers[which].zero_grad(set_to_none=True)
            self.load.loss(model).backward()
            self.optimizers[which].step()
        close(model)
        return self.clock() - begin


def pair_of(name: str, clock: Callable[[], float] = time.perf_counter) -> Pair:
    """Build a model twice."""
    load = workload(name)
    observed, alone = load.model, copy.deepcopy(load.model)
    optimizers = tuple(torch.optim.SGD(model.parameters(), lr=1e-4) for model in (observed, alone))
    return Pair(load, observed, alone, (optimizers[0], optimizers[1]), clock)


def _default_taps(model: nn.Module) -> Callable[[], None]:
    return tt.watch(model, to=tt.Memory()).close


def _bare_hooks(model: nn.Module) -> Callable[[], None]:
    handles = [module.register_forward_hook(lambda *_: None) for module in model.modules()]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _bare_walk(model: nn.Module) -> Callable[[], None]:
    for _ in model.named_modules():
        pass
    return lambda: None


# What is attached, each by a function that returns what takes it off again.
ATTACHING: Final[dict[str, Callable[[nn.Module], Callable[[], None]]]] = {
    ATTACH_LINE: _default_taps,
    "floor: a forward hook on every module": _bare_hooks,
    "floor: a walk over named_modules()": _bare_walk,
}


def attach_seconds(model: nn.Module, clock: Callable[[], float], rounds: int = 5) -> dict[str, float]:
    """Return how long attaching takes, and the floors, measured in turn; the medians."""
    times: dict[str, list[float]] = {what: [] for what in ATTACHING}
    for _ in range(rounds):
        for what, attach in ATTACHING.items():
            begin = clock()
            take_off = attach(model)
            times[what].append(clock() - begin)
            take_off()
    return {what: statistics.median(found) for what, found in times.items()}


def main() -> int:
    """Print the tables; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--what", choices=list(WAYS), action="append")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    missed = 0
    for name in asked.model or MODELS:
        pair = pair_of(name, CLOCKS[asked.clock])
        for mode in asked.mode or MODES:
            print(f"\n{name}, {mode}", flush=True)
            for what in asked.what or WAYS:
                if mode == "infer" and what in TRAINING_ONLY:
                    continue
                gc.collect()
                found = pair.ratio(WAYS[what], mode, asked.pairs, STRETCHES.get(what, 1))
                missed += _print(name, mode, what, found)
        if not asked.what:
            missed += _print_attaching(name, attach_seconds(pair.observed, pair.clock))
    return 1 if missed else 0


def _print_attaching(name: str, seconds: dict[str, float]) -> bool:
    """Print a line for the taps and one for each floor; return whether the taps took too long."""
    late = name == "blocks" and seconds[ATTACH_LINE] > ATTACH_LIMIT
    for what, found in seconds.items():
        print(f"  {what}: {found:.3f} s{'   MISSED' * (late and what == ATTACH_LINE)}", flush=True)
    return late


def _print(name: str, mode: str, what: str, found: Spread) -> bool:
    limit = LIMITS.get((name, mode, what))
    late = limit is not None and found.median > limit
    said = "" if limit is None else f"   must be ≤ {limit:.2f}{'   MISSED' * late}"
    print(f"  {what:50} {found}{said}", flush=True)
    return late


if __name__ == "__main__":
    sys.exit(main())
