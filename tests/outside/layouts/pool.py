"""Record many trainings in one start: PyTorch is imported once, and the ranks of each world size are forked from it."""

from __future__ import annotations

import faulthandler
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from forked_ranks import run_ranks

import tensortap as tt
from outside.layouts.subjects import training
from outside.layouts.training import Layout, Setup, Training

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
    kept = list(keep)
    by_size: dict[int, list[Recording]] = {}
    for recording in recordings:
        by_size.setdefault(recording.layout.world, []).append(recording)
    for size, group in sorted(by_size.items()):
        left = [recording for recording in group if not is_recorded(recording.name, out)]
        for recording in left:  # what a start that was cut short has left
            shutil.rmtree(out / recording.name, ignore_errors=True)
            (out / f"{recording.name}.error").unlink(missing_ok=True)
        codes = run_ranks(size, partial(_record_group, left, out, kept), out) if left else []
        (out / f"meeting{size}").unlink(missing_ok=True)  # another start of as many ranks meets anew
        for recording in left if not any(codes) else ():
            (out / f"{recording.name}.done").touch()
    return {path.stem: path.read_text() for path in sorted(out.glob("*.error"))}


def is_recorded(name: str, out: Path) -> bool:
    """Whether all ranks of an earlier start have recorded it."""
    return (out / f"{name}.done").exists()


def _record_group(group: list[Recording], out: Path, keep: list[object]) -> None:
    faulthandler.dump_traceback_later(600, exit=True)
    warnings.simplefilter("ignore")
    for recording in group:
        try:
            record(recording, out, keep)
        except Exception:
            (out / f"{recording.name}.error").write_text(traceback.format_exc())
            if recording.layout.world > 1:
                raise  # other ranks would wait for this one
