"""Seal closed tails in the background, and remove a file only when another one holds all of its rows."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tensortap.errors import RunError
from tensortap.store import segments
from tensortap.store.catalog import Catalog, RankFiles
from tensortap.store.claim import Lock, alone, compacting
from tensortap.store.files import Files, retry_if_moved
from tensortap.store.names import LOCK, is_hidden_name, rank_folder, rank_folders, segment_id, segment_name, tail_id
from tensortap.store.tail import Tail, remove_orphans
from tensortap.store.tail_reader import read_tail, row_kind


class _Waiting(NamedTuple):
    what: str
    path: Path
    rows: int
    tail: Tail | None = None  # where it is not closed yet


class Sealer:
    """The tails of one rank that are complete and wait to be sealed.

    `folders` are those of records, metrics, events and tensors; `lost` is told of rows whose tail is gone,
    `sealed` of those that were sealed.
    """

    def __init__(
        self, files: Files, folders: Mapping[str, str], lost: Callable[[str, int], None],
        sealed: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._files = files
        self._sealed = sealed
        self._folders = folders
        self._lost = lost
        self._waiting: deque[_Waiting] = deque()

    def add(self, what: str, path: Path, rows: int) -> None:
        """Seal a closed tail the next time."""
        self._waiting.append(_Waiting(what, path, rows))

    def add_tail(self, what: str, tail: Tail) -> None:
        """Close and seal a tail the next time: closing it takes as long as its last checksums."""
        self._waiting.append(_Waiting(what, tail.path, tail.rows, tail))

    def add_orphans(self, rank: int) -> None:
        """Seal the tails that an earlier process of this rank left behind; remove those it had sealed already."""
        catalog = Catalog(self._files)
        remove_leftovers(self._files, rank)
        with contextlib.suppress(RunError), compacting(self._files):  # a compaction may be writing hidden files
            remove_unfinished(self._files, rank)
        listings = (("records", catalog.records), ("metrics", catalog.metrics), ("events", catalog.events))
        for what, list_files in listings:
            found = retry_if_moved(lambda list_files=list_files: list_files(rank))  # type: ignore[misc]
            remove_sealed(self._files, found)
            for path in found.tails:
                self.add(what, path, 0)
        tensors = catalog.tensors(rank)
        for path in (*tensors.tails, *tensors.old_tails):
            self.add("tensors", path, 0)

    def seal(self) -> None:
        """Seal what is closed. What cannot be sealed now stays a tail, readable, and is tried again."""
        trouble: Exception | None = None
        for _ in range(len(self._waiting)):
            what, path, rows, tail = waiting = self._waiting.popleft()
            convert = segments.seal_tensors if what == "tensors" else segments.seal_records
            try:
                if tail is None or tail.close():
                    self._sealed(what, convert(self._files, self._folders[what], path))
            except FileNotFoundError:
                self._lost(what, rows)
            except Exception as error:
                trouble = error
                self._waiting.append(waiting)
        if trouble is not None:
            raise trouble


def remove_sealed(files: Files, found: RankFiles) -> None:
    """Remove tails that were sealed already, when all of their rows can be read from the segment."""
    for tail in found.old_tails:
        folder = str(tail.parent.relative_to(files.staging()))
        name = f"{folder}/{segment_name(str(tail_id(tail.name)))}"
        content = read_tail(tail, row_kind(folder))
        rows = 0 if content.table is None else len(content.table)
        # A segment of this name may have been compacted since: then look at the one that replaces it.
        holders = [name] if files.exists(name) else _replacing(found, tail)
        if any(_rows_in(files, holder) >= rows for holder in holders):
            segments.retire(tail, content)


def remove_leftovers(files: Files, rank: int) -> None:
    """Remove what lay beside tails that are gone. The caller holds the lock of the rank."""
    for folder in rank_folders(rank):
        remove_orphans(files.staging() / folder)


def remove_unfinished(files: Files, rank: int) -> None:
    """Remove the hidden files that a killed process began. The caller holds the locks of the rank and of compaction."""
    for folder in rank_folders(rank):
        _remove_hidden(files.staging() / folder)


def remove_unfinished_run_json(files: Files, ranks: Sequence[int]) -> None:
    """Remove what a killed process began of `run.json`, unless a process is writing a rank, or is about to."""
    with contextlib.ExitStack() as held, contextlib.suppress(RunError):
        held.enter_context(alone(files.local.parent if files.local else None))
        for rank in ranks:
            held.callback(Lock(files.staging() / rank_folder(rank) / LOCK).close)
        _remove_hidden(files.staging())


def _remove_hidden(folder: Path) -> None:
    for path in folder.glob(".*"):
        if is_hidden_name(path.name):
            path.unlink(missing_ok=True)


def _replacing(found: RankFiles, tail: Path) -> list[str]:
    return [name for name, outline in found.segments.items() if tail_id(tail.name) in outline.replaces]


def remove_replaced(files: Files, found: RankFiles) -> None:
    """Remove segments that were compacted into another one, when that can be read and has as many rows."""
    for name, outline in found.segments.items():
        replaced = [old for old in found.old_segments if segment_id(old.rpartition("/")[2]) in outline.replaces]
        if replaced and _rows_in(files, name) >= sum(_rows_in(files, old) for old in replaced):
            for old in replaced:
                files.remove(old)


def _rows_in(files: Files, name: str) -> int:
    """Return how many rows of a segment can be read; −1 when it cannot."""
    try:
        return segments.check_segment(files, name)
    except FileNotFoundError:
        return 0
    except segments.UNREADABLE:
        return -1
