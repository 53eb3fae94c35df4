"""Record many trainings in one start: PyTorch is imported once, and the ranks of each world size are forked from it."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import tensortap as tt
from outside.layouts.training import Layout, Setup, Training, training

Make = Callable[[Layout, Setup], Training]
VALUES = ("**:input", "**:output", "**:grad_output", "**:grad_input")
MEMBERS = ("**:param", "**:grad", "**:update")


class Recording(NamedTuple):
    """One training to be recorded: its folder's name, its layout, and what makes it."""

    name: str
    layout: Layout
    setup: Setup
    make: Make = training


def record(recording: Recording, out: Path, keep: Iterable[object] = ()) -> None:
    """Train and record on this rank."""
    run = recording.make(recording.layout, recording.setup)
    buffers = ("**:buffer",) if list(run.model.buffers()) else ()
    probe = tt.probe(*VALUES, *MEMBERS, *buffers, keep=[*keep] or [tt.stats(), tt.full()])
    with tt.watch(run.watched, probe, to=out / recording.name) as tap:
        for number in range(recording.setup.steps):
            run.step(number)
            tap.step()


def record_all(recordings: Iterable[Recording], out: Path, keep: Iterable[object] = ()) -> dict[str, str]:
    """Record all of them, those of one world size in one start of its ranks; return what went wrong by name."""
    out.mkdir(parents=True, exist_ok=True)
    by_size: dict[int, list[Recording]] = {}
    for recording in recordings:
        by_size.setdefault(recording.layout.world, []).append(recording)
    for size, group in sorted(by_size.items()):
        children = [_fork(rank, size, group, out, list(keep)) for rank in range(size)]
        for child in children:
            os.waitpid(child, 0)
    return {path.stem: path.read_text() for path in sorted(out.glob("*.error"))}


def _fork(rank: int, size: int, group: list[Recording], out: Path, keep: list[object]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        faulthandler.dump_traceback_later(900, exit=True)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        _join(rank, size, out)
        for recording in group:
            _record_or_explain(recording, out, keep)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _record_or_explain(recording: Recording, out: Path, keep: list[object]) -> None:
    try:
        record(recording, out, keep)
    except Exception:
        (out / f"{recording.name}.error").write_text(traceback.format_exc())
        if recording.layout.world > 1:
            raise  # other ranks would wait for this one


def _join(rank: int, size: int, out: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    if size > 1:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_RUN_ID=f"layouts-{size}")
        meeting = f"file://{out.absolute()}/meeting{size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
