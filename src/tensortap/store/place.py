"""Where a run goes when nobody says: a new folder under `runs/`, the same one for all ranks of a launch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tensortap.store.claim import alone, launch_id, launched
from tensortap.store.layout import rank_folder


def default_path(kind: str, rank: int, base: str = "runs", clock: Callable[[], float] = time.time) -> str:
    """`runs/<date>-<time>-<kind>`. Ranks of one launch agree on it through a small file beside it."""
    name = f"{base}/{time.strftime('%Y%m%d-%H%M%S', time.localtime(clock()))}-{kind}"
    if not launched():
        return _free(name)
    pointer = Path(base, f".launch-{launch_id()}")
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


def _free(name: str) -> str:
    return next(path for path in (name, *(f"{name}-{n}" for n in range(2, 10_000))) if not Path(path).exists())
