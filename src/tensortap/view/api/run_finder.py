"""Find the runs below a folder; only those can be asked for by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tensortap.errors import NotARunError, RunError, suggest
from tensortap.harvest.folder import is_harvest
from tensortap.store.files import Files
from tensortap.store.names import RUN_JSON

_DEEPEST: Final = 4  # folders below the one that was given
_MOST: Final = 1000


class RunFinder:
    """A folder of runs, or one run. A run's id is its path below the folder; one run alone has its folder's name.

    Links that lead out of the folder are not followed: neither to runs nor from within one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        files = Files(self.path)
        self.root = None if files.local is None else files.local.resolve()
        self.alone = files.exists(RUN_JSON)
        if not self.alone and (self.root is None or not self.root.is_dir()) and not is_harvest(self.path):
            missing = "" if files.exists() else ": no such folder"
            raise NotARunError(f"there is neither a run nor a folder of runs at {self.path!r}{missing}")

    def ids(self) -> list[str]:
        """Return the runs there are, in the order of their names."""
        if self.alone:
            return [self._own_id()]
        if self.root is None:
            return []
        found = (str(run.relative_to(self.root)) for run in _runs(self.root, self.root, _DEEPEST))
        return sorted(found)[:_MOST]

    def where(self, ident: str) -> str:
        """Return the path of a run, which may be named by nothing when it is the only one."""
        if self.alone:
            if ident in ("", self._own_id()):
                return self._checked(self.path)
            raise NotARunError(f"there is no run {ident!r} here, only {self._own_id()!r}")
        known = self.ids()
        if not ident and len(known) == 1:
            ident = known[0]
        if ident not in known:
            raise NotARunError(f"there is no run {ident!r} below {self.path}.{suggest(ident, known)}")
        assert self.root is not None
        return self._checked(str(self.root / ident))

    def _own_id(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2] if self.root is None else self.root.name

    def _checked(self, path: str) -> str:
        if self.root is not None:
            for link in _links(Path(path)):
                if not _inside(link, self.root):
                    raise RunError(f"{link} leads out of {self.root}; it is not followed")
        return path


def _runs(folder: Path, root: Path, depth: int) -> Iterator[Path]:
    """Yield folders with a `run.json`, at most so deep; hidden folders and links to elsewhere are left out."""
    if (folder / RUN_JSON).is_file():
        yield folder
        return
    for entry in _entries(folder) if depth else ():
        if entry.is_dir() and not entry.name.startswith(".") and _inside(Path(entry.path), root):
            yield from _runs(Path(entry.path), root, depth - 1)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # not ours to read, or gone meanwhile
        return []


def _links(folder: Path) -> Iterator[Path]:
    """Yield the symbolic links in a run's folder."""
    for entry in _entries(folder):
        if entry.is_symlink():
            yield Path(entry.path)
        elif entry.is_dir():
            yield from _links(Path(entry.path))


def _inside(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root)
