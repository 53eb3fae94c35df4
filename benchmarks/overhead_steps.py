"""What observing a training step costs, beside other ways of looking: ratios to the bare step, in one process.

This is the table of version 1, kept as it was; `overhead.py` visits every port and size.

    python benchmarks/overhead_steps.py [--model transformer|resnet|mlp] [--pairs N] [--threads N]

Exits with 1 when a figure that must be reached is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from models import Transformer, resnet18
from models import tiny as mlp
from torch import nn

import tensortap as tt

# ratio to the bare step that must be reached: transformer, resnet, mlp
LIMITS: dict[str, tuple[float | None, ...]] = {
    "stats": (1.05, 1.06, 1.20),
    "stats+histogram": (1.10, 1.12, 1.30),
    "outputs+gradients, both": (1.20, 1.20, 1.60),
    "every(100)": (1.01, 1.01, 1.01),
    "paused": (1.01, 1.01, 1.01),
    "budget=0.02": (1.03, 1.03, 1.03),
    "op:@matmul stats": (1.08, None, None),
    "op:@matmul, step not observed": (1.02, None, None),
}


def subject(name: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A model and a function that gives the loss of one batch."""
    torch.manual_seed(0)
    if name == "transformer":
        model: nn.Module = Transformer()
        tokens, targets = torch.randint(5000, (8, 128)), torch.randint(5000, (8 * 128,))
        return model, lambda: nn.functional.cross_entropy(model(tokens).view(-1, 5000), targets)
    if name == "resnet":
        model = resnet18()
        images, labels = torch.randn(8, 3, 96, 96), torch.randint(1000, (8,))
        return model, lambda: nn.functional.cross_entropy(model(images), labels)
    model = mlp()
    x = torch.randn(32, 64)
    return model, lambda: model(x).pow(2).mean()


def leaves(site: Any) -> bool:
    """Choose the modules without children, which was the default of version 1."""
    return bool(site.leaf)


Way = Callable[[nn.Module], contextlib.AbstractContextManager[Callable[[], None]]]


def _watching(*probes: Any, pause: bool = False, gradients: Any = None, **options: Any) -> Way:
    @contextlib.contextmanager
    def way(model: nn.Module) -> Iterator[Callable[[], None]]:
        chosen = [f"{name}:grad_output" for name, m in model.named_modules() if not any(True for _ in m.children())]
        probes_of = (*probes, tt.probe(*chosen, keep=gradients)) if gradients else probes
        with tempfile.TemporaryDirectory() as folder, tt.watch(model, *probes_of, to=f"{folder}/run", **options) as tap:
            if pause:
                tap.pause()
            yield tap.step

    return way


def _hooked(see: Callable[[torch.Tensor], Any]) -> Way:
    @contextlib.contextmanager
    def way(model: nn.Module) -> Iterator[Callable[[], None]]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            with torch.no_grad():
                see(output)

        handles = [m.register_forward_hook(hook) for m in model.modules() if not any(True for _ in m.children())]
        yield lambda: None
        for handle in handles:
            handle.remove()

    return way


def _tensorboard() -> Way:
    from torch.utils.tensorboard import SummaryWriter

    @contextlib.contextmanager
    def way(model: nn.Module) -> Iterator[Callable[[], None]]:
        with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
            histogram = _hooked(lambda y: writer.add_histogram("layer", y.detach()))
            with histogram(model) as step:
                yield step

    return way


def _eight(y: torch.Tensor) -> None:
    for reduce in (torch.mean, torch.std, torch.amin, torch.amax, torch.linalg.vector_norm, torch.count_nonzero):
        reduce(y)
    torch.isnan(y).sum()
    torch.isinf(y).sum()
    torch.histc(y, 64)


@contextlib.contextmanager
def _bare(model: nn.Module) -> Iterator[Callable[[], None]]:
    yield lambda: None


WAYS: dict[str, Way] = {
    "bare": _bare,
    "floor: each output read once": _hooked(lambda y: y.sum()),
    "stats": _watching(tt.probe(leaves, keep=tt.stats())),
    "stats+histogram": _watching(tt.probe(leaves, keep=[tt.stats(), tt.histogram()])),
    "outputs+gradients, both": _watching(
        tt.probe(leaves, keep=[tt.stats(), tt.histogram()]),
        gradients=[tt.stats(), tt.histogram()],
    ),
    "op:@matmul stats": _watching(tt.probe("op:@matmul", keep=tt.stats())),
    "hook with four .item()": _hooked(lambda y: [f(y).item() for f in (torch.mean, torch.std, torch.amin, torch.amax)]),
    "eight reductions + histc": _hooked(_eight),
    "TensorBoard add_histogram": _tensorboard(),
}

_PAUSED: Final = _watching(tt.probe(leaves), pause=True)
_MATMULS_LATER: Final = _watching(tt.probe("op:@matmul", keep=tt.stats(), when=tt.at([10**9])))


def measure(name: str, pairs: int) -> dict[str, float]:
    """Each way's step over a bare one, step about: what the machine does meanwhile falls on both alike."""
    model, loss_of = subject(name)
    train = Training(model, loss_of, torch.optim.SGD(model.parameters(), lr=1e-4))
    for _ in range(3):
        train.step()
    bare: list[float] = []
    result: dict[str, float] = {}
    for way, attach in WAYS.items():
        gc.collect()
        with attach(model) as close:
            train.timed(close)
            result[way], alone = train.ratio(close, pairs)
        bare += alone
    result["paused"] = _quietly(train, _PAUSED, 6 * pairs)
    result["every(100)"] = _every_hundred(train, 6 * pairs)
    result["op:@matmul, step not observed"] = _quietly(train, _MATMULS_LATER, 6 * pairs)
    result["budget=0.02"] = _budgeted(train, 3 * pairs)
    print(f"\n{name}: bare step {1e3 * statistics.median(bare):.1f} ms, {len([*model.modules()])} modules")
    return result


class Training(NamedTuple):
    """A model that is being trained, and how long its steps take."""

    model: nn.Module
    loss_of: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_of().backward()
        self.optimizer.step()

    def timed(self, close: Callable[[], None]) -> float:
        """Seconds of one step and of closing it."""
        start = time.perf_counter()
        self.step()
        close()
        return time.perf_counter() - start

    def bare(self) -> float:
        """Seconds of one step while nothing hangs on the model."""
        with _detached(self.model):
            return self.timed(lambda: None)

    def ratio(self, close: Callable[[], None], pairs: int) -> tuple[float, list[float]]:
        """The median watched step over the median bare one, which come in turn; and the bare ones."""
        watched, bare = [], []
        for _ in range(pairs):
            watched.append(self.timed(close))
            bare.append(self.bare())
        return statistics.median(watched) / statistics.median(bare), bare


def _every_hundred(train: Training, pairs: int) -> float:
    """One observed step in a hundred: the cost of the others, and a hundredth of the one."""
    with _watching(tt.probe(leaves, when=tt.every(100)))(train.model) as close:
        observed = train.timed(close)
        quiet, bare = train.ratio(close, min(pairs, 90))
    return 0.99 * quiet + 0.01 * observed / statistics.median(bare)


def _quietly(train: Training, way: Way, pairs: int) -> float:
    """Steps in which nothing is recorded."""
    with way(train.model) as close:
        close()
        return train.ratio(close, pairs)[0]


def _budgeted(train: Training, steps: int, rounds: int = 4) -> float:
    """Steps under a budget, observed and others, over as many bare ones, in turn by stretches.

    Not step about: the tap would take the bare step between two of its own for a part of them, and spend twice as much.
    """
    watched, bare = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        tt.watch(train.model, tt.probe(leaves), budget=0.02, to=f"{folder}/run") as tap,
    ):
        for _ in range(10):
            train.timed(tap.step)
        for _ in range(rounds):
            tap.resume()
            train.timed(tap.step)
            watched += [train.timed(tap.step) for _ in range(steps)]
            tap.pause()
            bare += [train.bare() for _ in range(steps)]
    return _trimmed(watched) / _trimmed(bare)


def _trimmed(times: list[float]) -> float:
    """The mean without the slowest twentieth, which the machine's other work made slow."""
    return statistics.fmean(sorted(times)[: -max(1, len(times) // 20)])


@contextlib.contextmanager
def _detached(model: nn.Module) -> Iterator[None]:
    """Without any hook for a while: what the bare step costs between two watched stretches."""
    kept = [(m, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    for module, _, _ in kept:
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    yield
    for module, after, before in kept:
        module._forward_hooks.update(after)
        module._forward_pre_hooks.update(before)


def main() -> int:
    """Print the table; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=["transformer", "resnet", "mlp"], action="append")
    parser.add_argument("--pairs", type=int, default=15, help="how many steps of each way, with as many bare ones")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    missed = 0
    for name in options.model or ["transformer", "resnet", "mlp"]:
        which = ["transformer", "resnet", "mlp"].index(name)
        for way, ratio in measure(name, options.pairs).items():
            limit = LIMITS[way][which] if way in LIMITS else None
            late = limit is not None and ratio > limit
            missed += late
            said = f"   must be ≤ {limit:.2f}{'   MISSED' * late}" if limit else ""
            print(f"  {way:32} ×{ratio:6.3f}{said}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
