"""List the files of a run: sealed segments, tails that are not sealed yet, and files of tensors."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from tensortap.store import names as layout
from tensortap.store.files import Files
from tensortap.store.schema import METRICS, RECORDS
from tensortap.store.segments import PLACE, PLACES, REPLACES, STEPS, outline

_RANK: Final = pa.field("rank", pa.int32())
_TRIES: Final = 10
T = TypeVar("T")


def _plain(schema: Any) -> Any:
    """Return the schema with plain strings instead of dictionaries, and with the rank (from the folder's name)."""
    fields = [
        pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type, metadata=f.metadata)
        for f in schema
    ]
    return pa.schema([*fields[:2], _RANK, *fields[2:]])


PLAIN_RECORDS: Final = _plain(RECORDS)
PLAIN_METRICS: Final = _plain(METRICS)


class Outline(NamedTuple):
    """What a segment's footer says of it.

    A place comes with its first sequence number and its row count; steps are (first, last, stride) ranges.
    """

    places: list[tuple[str, str, str, str, int, int]]
    steps: list[tuple[int, int, int]]
    rows: int
    replaces: frozenset[str]


class RankFiles(NamedTuple):
    """The files of one rank that hold rows of one kind, and those whose rows another file holds already."""

    rank: int
    segments: dict[str, Outline]
    tails: list[Path]
    old_segments: list[str]
    old_tails: list[Path]


class TensorFiles(NamedTuple):
    """The files of one rank that hold tensors: sealed ones by name, and tails that are not sealed yet."""

    rank: int
    names: list[str]
    tails: list[Path]


class Catalog:
    """Lists a run's files, remembers the footers it has read, and counts what cannot be read."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.damaged: set[str] = set()
        self.damaged_tensors: set[str] = set()
        self._unreadable: set[str] = set()
        self._outlines: dict[str, Outline] = {}
        self._lock = threading.Lock()

    def ranks(self) -> list[int]:
        """Return the ranks that have written something."""
        names = {*self.files.list(), *(p.name for p in self.files.staging().glob("rank=*"))}
        return sorted(rank for name in names if (rank := layout.rank_of(name)) is not None)

    def records(self, rank: int) -> RankFiles:
        """Return the files that hold a rank's records."""
        return self._rows(rank, layout.rank_folder(rank))

    def metrics(self, rank: int) -> RankFiles:
        """Return the files that hold a rank's metrics."""
        return self._rows(rank, layout.metrics_folder(rank))

    def tensors(self, rank: int) -> TensorFiles:
        """Return the files that hold a rank's tensors."""
        folder = layout.tensors_folder(rank)
        tails = self._tails(folder)  # before the sealed ones, as in `_rows`
        names = [name for name in self.files.list(folder) if layout.tensor_file(name)]
        sealed = {layout.tensors_id(name) for name in names}
        rest = sorted(path for path, ident in tails.items() if ident not in sealed)
        return TensorFiles(rank, [f"{folder}/{name}" for name in names], rest)

    def mark_damaged(self, name: str) -> None:
        """Leave out a segment whose footer is whole but whose rows cannot be read."""
        self._unreadable.add(name)
        self.damaged.add(name)

    def _rows(self, rank: int, folder: str) -> RankFiles:
        """List one folder. Raises FileNotFoundError when a file goes away meanwhile: read again (`retry_if_moved`)."""
        # Tails are listed first: one that is sealed meanwhile is then seen as a segment, never missed.
        tails = self._tails(folder)
        names = [f"{folder}/{name}" for name in self.files.list(folder) if layout.segment_id(name)]
        whole = {name: found for name in names if (found := self._outline(name)) is not None}
        gone = frozenset[str]().union(*(found.replaces for found in whole.values()))
        sealed = {_ident(name) for name in whole} | gone
        return RankFiles(
            rank,
            {name: found for name, found in whole.items() if _ident(name) not in gone},
            sorted(path for path, ident in tails.items() if ident not in sealed),
            [name for name in whole if _ident(name) in gone],
            sorted(path for path, ident in tails.items() if ident in sealed),
        )

    def _tails(self, folder: str) -> dict[Path, str | None]:
        return {path: layout.tail_id(path.name) for path in (self.files.staging() / folder).glob("_tail-*.arrows")}

    def _outline(self, name: str) -> Outline | None:
        with self._lock:
            if name in self._outlines:
                return None if name in self._unreadable else self._outlines[name]
        try:
            with self.files.open(name) as file:
                found = _parse(pq.read_metadata(file))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, TypeError, pa.ArrowException):
            self.damaged.add(name)
            return None
        with self._lock:
            self._outlines[name] = found
        return found


def _ident(name: str) -> str | None:
    return layout.segment_id(name.rpartition("/")[2])


def _parse(metadata: Any) -> Outline:
    said = metadata.metadata or {}
    return Outline(
        _places(said.get(PLACES, b"[]")),
        [tuple(run) for run in json.loads(said.get(STEPS, b"[]"))],
        metadata.num_rows,
        frozenset(json.loads(said.get(REPLACES, b"[]"))),
    )


@functools.lru_cache(maxsize=64)
def _places(said: bytes) -> list[tuple[str, str, str, str, int, int]]:
    """Parse a footer's places. The segments of one run mostly have the same, and parsing is most of opening a run."""
    return [tuple(place) for place in json.loads(said)]


def dataset(files: Files, names: list[str], schema: Any) -> Any:
    """Return segments as one `pyarrow.dataset`, with the rank from their folders' names."""
    import pyarrow.dataset as ds  # it imports pandas, which a process that only writes should not have to

    return ds.dataset(
        [files.path(name) for name in names],
        schema=schema,
        filesystem=files.fs,
        format="parquet",
        partitioning=ds.partitioning(pa.schema([_RANK]), flavor="hive"),
    )


def plain_rows(table: Any, rank: int, schema: Any) -> Any:
    """Return a tail's rows in the plain schema; columns that an older version did not write are null."""
    known = {
        field.name: table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    }
    known["rank"] = pa.repeat(pa.scalar(rank, pa.int32()), len(table))
    return pa.table(known).cast(schema)


def tail_outline(table: Any) -> Outline:
    """Return what a sealed segment would say of these rows."""
    if not table.num_rows or PLACE[0] not in table.column_names:
        return Outline([], [], table.num_rows, frozenset())
    said = outline(table)
    return Outline(json.loads(said[PLACES]), json.loads(said[STEPS]), table.num_rows, frozenset())


def retry_if_moved(read: Callable[[], T]) -> T:
    """Read again when a file was sealed or compacted away between listing and opening it."""
    for attempt in range(_TRIES):
        try:
            return read()
        except FileNotFoundError:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("unreachable")
