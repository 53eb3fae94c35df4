"""Choose the folder of a run when none is given: under `runs/`, the same one for all ranks of a launch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tensortap.store.claim import alone, launch_id, launched
from tensortap.store.names import rank_folder


def default_path(
    kind: str, rank: int, base: str = "runs", clock: Callable[[], float] = time.time, *, turn: int = 0,
    spawned: bool = False,
) -> str:  # fmt: skip
    """Return `runs/<date>-<time>-<kind>`. Ranks of one launch agree on it through a small file beside it.

    `turn` tells the runs of one process apart: a fast rank's second must not become a slow rank's first.
    """
    name = f"{base}/{time.strftime('%Y%m%d-%H%M%S', time.localtime(clock()))}-{kind}"
    if not (launched() or spawned):
        return _free(name)
    pointer = _pointer(base, turn, spawned)
    with alone(pointer.parent):
        known = pointer.read_text() if pointer.exists() else ""
        if known and not Path(known, rank_folder(rank)).exists():
            return known
        # The first of this launch, or an earlier launch that looked the same, e.g. on the same port.
        path = _free(name)
        draft = pointer.with_name(f"{pointer.name}.{os.getpid()}")
        draft.write_text(path)
        draft.replace(pointer)
        return path


def agreed_path(base: str = "runs", *, turn: int = 0, spawned: bool = False) -> str | None:
    """Return the path that other ranks of this launch have agreed on, if they have."""
    pointer = _pointer(base, turn, spawned)
    return pointer.read_text() if pointer.exists() else None


def _pointer(base: str, turn: int, spawned: bool) -> Path:
    return Path(base, f".launch-{launch_id(spawned)}" + (f"-{turn}" if turn else ""))


def _free(name: str) -> str:
    return next(path for path in (name, *(f"{name}-{n}" for n in range(2, 10_000))) if not Path(path).exists())
