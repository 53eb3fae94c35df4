"""Train without recording, and compare parameters: `python -m outside.layouts.reports.plain OUT [--strangers]`.

A correct training must come to the reference's parameters and buffers, and one with a fault must not. That is asked
with PyTorch alone, so that whether a case is what it is called does not depend on what is tested with it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from outside.layouts.reports.cases import FAULTS, correct
from outside.layouts.strangers.cases import FAULTS as STRANGERS
from outside.layouts.strangers.cases import correct as stranger_pairs
from outside.layouts.third.cases import TRAIN, Case
from outside.layouts.third.judge import reference
from outside.layouts.third.scene import Scene

NEAR = 1e-4


def trained(scene: Scene) -> dict[str, Tensor]:
    """Return this rank's parameters and buffers after the training, in float32 arithmetic whatever the scene says."""
    watched, step = TRAIN[scene.model](replace(scene, dtype=torch.float32))
    for number in range(scene.steps):
        step(number)
    if dist.is_initialized() and scene.has("overlapped"):  # parameters wait for the next forward pass
        watched(torch.zeros(2, 6).long(), torch.tensor([True, False]), torch.zeros(1, 20))
    model: Any = getattr(watched, "submod", watched)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named = {name.removeprefix("module."): t for name, t in state.items()}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in named.items()}


def whole(name: str, own: Tensor, like: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the part of the reference that a rank should hold."""
    for dim in range(own.ndim):
        if own.shape[dim] * ranks == like.shape[dim]:
            return like.chunk(ranks, dim)[rank]
    return like


def agrees(scene: Scene, wanted: dict[str, Tensor]) -> bool:
    """Whether all that a rank has is the reference's."""
    parts = ((name, own, wanted[name]) for name, own in trained(scene).items())
    return all(
        torch.allclose(own, whole(name, own, like, scene.rank, scene.world), NEAR, NEAR) for name, own, like in parts
    )


def compare(cases: Iterable[Case], out: Path) -> None:
    """Write for each case whether this rank came to the reference."""
    warnings.simplefilter("ignore")
    for case in cases:
        scene = case.scene
        same = agrees(scene, torch.load(out / f"{_name(scene)}.pt"))
        (out / f"{case.name}.rank{scene.rank}").write_text(str(same))


def _name(scene: Scene) -> str:
    one = reference(scene)
    return f"{one.model} {'-'.join(one.options)}"


def save(scenes: Iterable[Scene], out: Path) -> None:
    """Train the references."""
    for scene in scenes:
        torch.save(trained(reference(scene)), out / f"{_name(scene)}.pt")


def main() -> int:
    """Train all, and print the cases that are not what they are called."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    known = (*STRANGERS, *stranger_pairs()) if "--strangers" in sys.argv else (*FAULTS, *correct())
    cases = [case for case in known if case.scene.dtype == torch.float32 and not case.scene.has("mixed")]
    codes = run_ranks(1, partial(save, [case.scene for case in cases], out), out)
    for world in (2, 4):
        codes += run_ranks(world, partial(compare, [case for case in cases if case.scene.world == world], out), out)
        (out / f"meeting{world}").unlink(missing_ok=True)
    wrong = 0
    for case in cases:
        same = all(path.read_text() == "True" for path in out.glob(f"{case.name}.rank*"))
        if same != (case.answer is None):
            wrong += 1
            print(f"{case.name}: {'comes' if same else 'does not come'} to the reference")
    print(f"{len(cases)} cases, {wrong} of them not what they are called")
    return 1 if wrong or any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
