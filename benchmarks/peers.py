"""What other tools cost on the same models: ratios of processor time to the bare step, in one process.

    python benchmarks/peers.py [--model tiny|transformer] [--pairs N]

Tools that are not installed are left out. Install them beside the environment, and name that folder in PYTHONPATH:
`pip install --target FOLDER --no-deps torchlens nnsight`. Each does what its own documentation shows first; they do not
do the same, which docs/comparison.md says.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from models import workload
from torch import nn

import tensortap as tt

Step = Callable[[], object]


class Inputs:
    """The batch that a workload gives to its model."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        seen: list[torch.Tensor] = []
        handle = model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        loss(model)
        handle.remove()
        self.batch = seen[0]


def leaves(model: nn.Module) -> list[str]:
    """Return the modules without children in the order in which they run."""
    names = {module: name for name, module in model.named_modules() if not any(True for _ in module.children())}
    order: list[str] = []
    handles = [m.register_forward_hook(lambda module, args, out: order.append(names[module])) for m in names]
    with torch.no_grad():
        model(BATCH[0])
    for handle in handles:
        handle.remove()
    return order


BATCH: list[torch.Tensor] = []


@contextlib.contextmanager
def bare(model: nn.Module, step: Step) -> Iterator[Step]:
    """Nobody looks."""
    yield step


@contextlib.contextmanager
def statistics_to_a_run(model: nn.Module, step: Step) -> Iterator[Step]:
    """tensortap's default: statistics and a histogram of every layer's output, written to a run folder."""
    with tempfile.TemporaryDirectory() as folder, tt.watch(model, to=f"{folder}/run") as tap:
        yield lambda: (step(), tap.step())


@contextlib.contextmanager
def gradients_to_a_run(model: nn.Module, step: Step) -> Iterator[Step]:
    """What wandb.watch(log="all") shows, by tensortap: parameters and their gradients with histograms."""
    with tempfile.TemporaryDirectory() as folder, tt.watch(model, "**:{param,grad}", to=f"{folder}/run") as tap:
        yield lambda: (step(), tap.step())


@contextlib.contextmanager
def captured(model: nn.Module, step: Step) -> Iterator[Step]:
    """tt.capture: the tensors themselves, in a dict."""
    yield lambda: tt.capture(model, BATCH[0], "**")


@contextlib.contextmanager
def torchlens(model: nn.Module, step: Step) -> Iterator[Step]:
    """TorchLens: every operation of one forward pass, tensors kept."""
    import torchlens as tl

    yield lambda: tl.trace(model, BATCH[0])


@contextlib.contextmanager
def nnsight(model: nn.Module, step: Step) -> Iterator[Step]:
    """nnsight: the output of every leaf module of one forward pass, saved."""
    from nnsight import NNsight

    wrapped, order = NNsight(model), leaves(model)
    modules = [wrapped.get(name) for name in order]

    def traced() -> object:
        with wrapped.trace(BATCH[0]):
            found = list().save()  # noqa: C408  # what is not saved does not leave the block
            for module in modules:
                found.append(module.output)
        return found

    yield traced


@contextlib.contextmanager
def wandb_watch(model: nn.Module, step: Step) -> Iterator[Step]:
    """wandb.watch(log="all", log_freq=1), offline: histograms of gradients and parameters."""
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
        run.watch(model, log="all", log_freq=1)
        yield lambda: (step(), run.log({"step": 1}))
        run.unwatch(model)
        run.finish()


INFERENCE = {
    "tensortap, to a run": statistics_to_a_run,
    "tt.capture": captured,
    "TorchLens": torchlens,
    "nnsight": nnsight,
}
TRAINING = {
    "tensortap, outputs": statistics_to_a_run, "tensortap, parameters and gradients": gradients_to_a_run,
    "wandb.watch": wandb_watch,
}  # fmt: skip
NEEDS = {"TorchLens": "torchlens", "nnsight": "nnsight", "wandb.watch": "wandb"}


def timed(step: Step) -> float:
    """Return the seconds of one step: of the processor, in all threads of this process, whatever else is running."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def ratio(model: nn.Module, step: Step, way: Callable, pairs: int) -> tuple[float, float, float]:
    """Return the median ratio of pairs, and the quartiles. The bare step is timed while nobody looks."""
    ratios = []
    for _ in range(3):
        step()
    for _ in range(max(1, pairs // 5)):
        plain = statistics.median(timed(step) for _ in range(9))
        with way(model, step) as looking:
            looking()
            gc.collect()
            ratios += [timed(looking) / plain for _ in range(5)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return low, middle, high


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "transformer"), default="tiny")
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    os.environ.setdefault("WANDB_SILENT", "true")
    torch.set_num_threads(1)
    model, loss = workload(given.model)
    BATCH.append(Inputs(model, loss).batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def trained() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    def called() -> None:
        with torch.no_grad():
            model(BATCH[0])

    for title, step, ways in (("inference", called, INFERENCE), ("training", trained, TRAINING)):
        print(f"{given.model}, {title}: {1000 * statistics.median(timed(step) for _ in range(9)):.2f} ms bare")
        for name, way in ways.items():
            if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
                continue
            try:
                low, middle, high = ratio(model, step, way, given.pairs)
                print(f"  {name:40} x{middle:.3g} ({low:.3g} to {high:.3g})", flush=True)
            except Exception as error:
                print(f"  {name:40} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
