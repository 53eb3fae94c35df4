"""Record small trainings of real frameworks, each in two launches of which the second is killed.

    python tests/store/framework_runs.py /tmp/runs                  # all of them
    python tests/store/framework_runs.py /tmp/runs keras jax

`mutations.py --frameworks` damages them: they have what a run of plain arrays has not, such as several ranks and their
parts, events, evaluation steps, gradients, and numbers of functions.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tensortap as tt
from tensortap.store import names as layout

STEPS = 3
KEEP = [tt.stats(), tt.histogram(), tt.sample(4)]


def leave(run: Path, killed: Path) -> None:
    """Copy a run that is being written, once what was appended has its checksums: so a killed process leaves it."""
    for _ in range(200):
        tails = [tail for tail in run.rglob("_tail-*.arrows") if tail.stat().st_size]
        if all(_checked(tail) for tail in tails):
            break
        time.sleep(0.02)
    shutil.copytree(run, killed, ignore=shutil.ignore_patterns("_control", ".*"))


def _checked(tail: Path) -> bool:
    from tensortap.store.tail import read_checks

    return max((check.end for check in read_checks(tail)), default=0) == tail.stat().st_size


def keras(path: Path, killed: Path, launch: int) -> None:
    """`fit` and `evaluate` of a small classifier, in graphs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras as framework

    framework.utils.set_random_seed(0)
    layers = [framework.layers.Dense(6, "relu", name="hidden"), framework.layers.Dense(2, name="head")]
    model = framework.Sequential([framework.Input((4,)), *layers])
    model.compile(framework.optimizers.SGD(0.1), framework.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.random.default_rng(0).normal(size=(12, 4)).astype("float32"), np.arange(12) % 2
    with tt.watch(model, tt.probe("**:{output,grad}", keep=KEEP), to=path, resume=launch > 0, context=True):
        model.fit(x, y, batch_size=4, verbose=0)
        model.evaluate(x, y, batch_size=6, verbose=0)
        leave(path, killed)


def jax(path: Path, killed: Path, launch: int) -> None:
    """A compiled step of plain functions with named values, their cotangents and operations."""
    import jax as framework
    import jax.numpy as jnp

    def loss(params: Any, x: Any) -> Any:
        params = tt.tap(params, "net/params")
        with framework.named_scope("hidden"):
            hidden = jnp.tanh(x @ params["w"])
        return jnp.square(hidden).sum()

    params = {"w": jnp.ones((4, 2))}
    probe = tt.probe("net/params:grad_output", "hidden", "hidden/dot_general", keep=KEEP)
    with tt.watch_step(framework.jit(framework.grad(loss)), params, probe, to=path, resume=launch > 0) as step:
        for number in range(STEPS):
            step(params, jnp.ones((3, 4)) * number)
            step.tap.step(loss=1.0 / (number + 1))
        leave(path, killed)


def ddp(path: Path, killed: Path, launch: int) -> None:
    """`DistributedDataParallel` on two ranks, with hashes, events and a function of the user."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from forked_ranks import run_ranks

    meeting = path.with_name(f"ddp-meeting-{launch}")
    meeting.mkdir(parents=True)
    codes = run_ranks(2, lambda: _train_ddp(path, killed, launch), meeting)
    assert codes == [0, 0], codes


def _train_ddp(path: Path, killed: Path, launch: int) -> None:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probes = [tt.probe("**", keep=[*KEEP, largest]), tt.probe("**:{param,grad}", keep=[tt.stats(), tt.hash()])]
    with tt.watch(model, *probes, to=path, resume=launch > 0, context=True) as tap:
        for _ in range(STEPS):
            loss = model(torch.randn(3, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tap.step(loss=loss)
        dist.barrier()
        if dist.get_rank() == 0:
            leave(path, killed)
        dist.barrier()


def largest(x: Any) -> float:
    """A number of the user's own."""
    return float(x.max())


FRAMEWORKS: dict[str, Callable[[Path, Path, int], None]] = {"keras": keras, "jax": jax, "ddp": ddp}


def recorded(folder: Path, names: list[str]) -> list[Path]:
    """Record runs, each in processes of its own; return where they lie."""
    for name in names:
        for launch in ("0", "1"):
            subprocess.run([sys.executable, __file__, str(folder), name, launch], check=True)
        shutil.rmtree(folder / name)
    return [folder / f"{name}-killed" for name in names]


def main(folder: Path, names: list[str], launch: str = "") -> None:
    """Record what is named, or one launch of it."""
    if not launch:
        print(*recorded(folder, names or list(FRAMEWORKS)), sep="\n")
        return
    numbered = itertools.count(int(launch) * 1000 + 1)
    layout.new_id = lambda: f"{next(numbered) + 100_000 * int(os.environ.get('RANK', 0)):032x}"
    killed = folder / f"{names[0]}-killed"
    shutil.rmtree(killed, ignore_errors=True)
    FRAMEWORKS[names[0]](folder / names[0], killed, int(launch))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0]), *([given[1:]] if not given[-1].isdigit() else [given[1:-1], given[-1]]))
