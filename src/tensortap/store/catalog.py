"""Which files make up a run right now: sealed segments, and the tails that are not sealed yet."""

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
from tensortap.store.tail import read_tail

_RANK: Final = pa.field("rank", pa.int32())
_TRIES: Final = 10
T = TypeVar("T")


def _plain(schema: Any) -> Any:
    """The same columns with words as plain strings, and the rank that the folder's name gives."""
    fields = [
        pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type, metadata=f.metadata)
        for f in schema
    ]
    return pa.schema([*fields[:2], _RANK, *fields[2:]])


PLAIN_RECORDS: Final = _plain(RECORDS)
PLAIN_METRICS: Final = _plain(METRICS)


class Outline(NamedTuple):
    """What a segment says of itself: its places with their first sequence number and row count, and its steps."""

    places: list[tuple[str, str, str, str, int, int]]
    steps: list[tuple[int, int, int]]
    rows: int
    replaces: frozenset[str]


class Sources(NamedTuple):
    """The files of one kind of one rank: what holds its rows, and what others hold already and can go."""

    rank: int
    segments: dict[str, Outline]
    tails: list[Path]
    old_segments: list[str]
    old_tails: list[Path]


class Catalog:
    """Lists a run's files, remembers the footers it has read, and counts what cannot be read."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.damaged: set[str] = set()
        self._spoilt: set[str] = set()
        self._outlines: dict[str, Outline] = {}
        self._lock = threading.Lock()

    def ranks(self) -> list[int]:
        """The ranks that have written something."""
        names = {*self.files.list(), *(p.name for p in self.files.staging().glob("rank=*"))}
        return sorted(rank for name in names if (rank := layout.rank_of(name)) is not None)

    def records(self) -> list[Sources]:
        """The files that hold records."""
        return [self.sources(rank, layout.rank_folder(rank)) for rank in self.ranks()]

    def metrics(self) -> list[Sources]:
        """The files that hold metrics."""
        return [self.sources(rank, layout.metrics_folder(rank)) for rank in self.ranks()]

    def sources(self, rank: int, folder: str) -> Sources:
        """The files in one folder. Raises FileNotFoundError when one goes away meanwhile: look again (`settled`)."""
        # Tails are listed first: one that is sealed meanwhile is then seen as a segment, never missed.
        tails = {path: layout.tail_id(path.name) for path in (self.files.staging() / folder).glob("_tail-*.arrows")}
        names = [f"{folder}/{name}" for name in self.files.list(folder) if layout.segment_id(name)]
        whole = {name: found for name in names if (found := self._outline(name)) is not None}
        gone = frozenset[str]().union(*(found.replaces for found in whole.values()))
        sealed = {_ident(name) for name in whole} | gone
        return Sources(
            rank,
            {name: found for name, found in whole.items() if _ident(name) not in gone},
            sorted(path for path, ident in tails.items() if ident not in sealed),
            [name for name in whole if _ident(name) in gone],
            sorted(path for path, ident in tails.items() if ident in sealed),
        )

    def spoil(self, name: str) -> None:
        """Leave out a segment whose footer is whole but whose content cannot be read."""
        self._spoilt.add(name)
        self.damaged.add(name)

    def _outline(self, name: str) -> Outline | None:
        with self._lock:
            if name in self._outlines:
                return None if name in self._spoilt else self._outlines[name]
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
    """A footer's places. The segments of one run mostly say the same, and parsing it is most of opening a run."""
    return [tuple(place) for place in json.loads(said)]


def dataset(files: Files, names: list[str], schema: Any) -> Any:
    """Segments as one `pyarrow.dataset`, with the rank from their folders' names."""
    import pyarrow.dataset as ds  # it imports pandas, which a process that only writes should not have to

    return ds.dataset(
        [files.path(name) for name in names],
        schema=schema,
        filesystem=files.fs,
        format="parquet",
        partitioning=ds.partitioning(pa.schema([_RANK]), flavor="hive"),
    )


def tail_table(sources: Sources, schema: Any) -> Any:
    """The rows of a rank's tails, in the plain schema."""
    tables = []
    for path in sources.tails:
        table = read_tail(path)
        if table is not None:
            rank = pa.array([sources.rank], pa.int32()).take(pa.array([0] * table.num_rows, pa.int32()))
            tables.append(table.append_column(_RANK, rank).select(schema.names).cast(schema))
    return pa.concat_tables(tables) if tables else schema.empty_table()


def tail_outline(table: Any) -> Outline:
    """What a sealed segment would say of these rows."""
    if not table.num_rows or PLACE[0] not in table.column_names:
        return Outline([], [], table.num_rows, frozenset())
    said = outline(table)
    return Outline(json.loads(said[PLACES]), json.loads(said[STEPS]), table.num_rows, frozenset())


def settled(read: Callable[[], T]) -> T:
    """Read again when a file was sealed or folded away between listing and opening it."""
    for attempt in range(_TRIES):
        try:
            return read()
        except FileNotFoundError:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("unreachable")
