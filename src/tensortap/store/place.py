"""Where a run goes when nobody says: a new folder under `runs/`, the same one for all ranks of a launch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tensortap.store.claim import launch_id, launched
from tensortap.store.layout import rank_folder

_TRIES = 100


def default_path(kind: str, rank: int, base: str = "runs", clock: Callable[[], float] = time.time) -> str:
    """`runs/<date>-<time>-<kind>`. Ranks of one launch agree on it through a small file beside it."""
    name = f"{base}/{time.strftime('%Y%m%d-%H%M%S', time.localtime(clock()))}-{kind}"
    if not launched():
        return _free(name)
    pointer = Path(base, f".launch-{launch_id()}")
    for _ in range(_TRIES):
        path = _agree(pointer, name)
        if not Path(path, rank_folder(rank)).exists():
            return path
        _retire(pointer)  # an earlier launch that looked the same, e.g. on the same port
    return _free(name)


def _free(name: str) -> str:
    return next(path for path in (name, *(f"{name}-{n}" for n in range(2, 10_000))) if not Path(path).exists())


def _agree(pointer: Path, name: str) -> str:
    """The path the first process wrote down; ours when we are the first."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    draft = pointer.with_name(f"{pointer.name}.{os.getpid()}")
    draft.write_text(_free(name))
    try:
        os.link(draft, pointer)
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)
    return pointer.read_text()


def _retire(pointer: Path) -> None:
    pointer.unlink(missing_ok=True)
