"""Open the destinations of `to=`: sinks, with the run folder among them."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tensortap.distributed.ranks import World
from tensortap.record.counters import Counters
from tensortap.record.sink import Sink
from tensortap.sinks.convert import as_sink
from tensortap.store.claim import launch_id
from tensortap.store.default_path import agreed_path, default_path
from tensortap.store.files import Files
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run

_TURNS: Final = itertools.count()  # its number among the watches of this process


class Destinations(NamedTuple):
    """Every sink, and the run folder if one of them is."""

    sinks: list[Sink]
    folder: RunFolder | None


@dataclass(frozen=True)
class RunFolderMaker:
    """Make the run folder of one watch: its description, its rank, and whether to resume or overwrite an
    existing run.
    """

    kind: str
    world: World
    about: Mapping[str, Any]
    counters: Counters
    resume: bool = False
    overwrite: bool = False

    def make(self, path: str | os.PathLike[str] | None) -> RunFolder:
        """Claim a folder; without a path, a new one under `runs/`."""
        if path is None:
            path = default_path(self.kind, self.world.rank, turn=next(_TURNS), spawned=self.world.size > 1)
        return RunFolder(
            path, rank=self.world.rank, about=self.about, resume=self.resume, overwrite=self.overwrite,
            counters=self.counters, launch=launch_id(self.world.size > 1), after=functools.partial(_next_step, path),
        )  # fmt: skip


def open_destinations(to: Any, maker: RunFolderMaker) -> Destinations:
    """Open everything that was given: paths (or nothing) as run folders, all else as sinks."""
    sinks: list[Sink] = []
    folder = None
    for item in _listed(to):
        if item is None or isinstance(item, (str, os.PathLike)):
            folder = maker.make(item)
            sinks.append(folder)
        else:
            sinks.append(as_sink(item))
    return Destinations(sinks, folder)


def path_of_others(to: Any, world: World) -> tuple[str | None, Callable[[], str | None]]:
    """Return the path of the ranks that record, for one that does not: known now, or found when it is needed."""
    path: str | None = None
    ask: Callable[[], str | None] = _nowhere
    for item in _listed(to):
        if isinstance(item, (str, os.PathLike)):
            path = str(Files(item))
        elif item is None:
            ask = functools.partial(agreed_path, turn=next(_TURNS), spawned=world.size > 1)
    return path, ask


def _nowhere() -> None:
    return None


def _listed(to: Any) -> Iterable[Any]:
    return to if isinstance(to, (list, tuple)) else [to]


def _next_step(path: str | os.PathLike[str]) -> int:
    """Return the number after the last step that left anything: one that a crash cut short is not begun again."""
    return open_run(path).last_step + 1
