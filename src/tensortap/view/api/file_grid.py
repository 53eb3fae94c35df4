"""Read one file of a run as a grid of one statistic: only the columns it takes.

A column of which the footer says "all zero" (no NaN, nothing recomputed) is known without reading it, and in a folded
segment, which is sorted by place, the footer tells which rows are whose.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tensortap.reduce.statistics import NONFINITE, STATISTICS
from tensortap.store.blocks import array_of, places_in, zero_columns
from tensortap.store.catalog import Outline, expanded
from tensortap.store.files import Files
from tensortap.store.snapshot import Snapshot, Triple
from tensortap.view.api.grid import Grid, Ints, scattered
from tensortap.view.api.stats import Stat

_WORDS: Final = ("site", "port", "slot")


class ColumnPlaces:
    """The places of a grid's columns. Compared by identity, so that what is worked out for one is kept for it."""

    def __init__(self, triples: Sequence[Triple]) -> None:
        self.triples = tuple(triples)
        self._rows: weakref.WeakKeyDictionary[Snapshot, Ints] = weakref.WeakKeyDictionary()

    def rows_in(self, snapshot: Snapshot) -> Ints:
        """Return the row of each column in a run's grid; −1 where the run has no such place."""
        if snapshot not in self._rows:
            self._rows[snapshot] = np.array([snapshot.rows.get(triple, -1) for triple in self.triples], np.int64)
        return self._rows[snapshot]


class FileGrid(NamedTuple):
    """A statistic of one file: its steps × its places."""

    places: ColumnPlaces
    steps: Ints
    grid: Grid

    @property
    def nbytes(self) -> int:
        """How much room it takes."""
        return self.grid.nbytes + self.steps.nbytes + 64 * len(self.places.triples)


class FileRows(NamedTuple):
    """FileRows as they were read; columns that are missing are zero everywhere."""

    columns: Any
    places: ColumnPlaces
    place: Ints
    total: int

    def number(self, name: str) -> npt.NDArray[Any]:
        """Return a column of numbers."""
        if name not in self.columns.column_names:
            return np.full(self.total, np.nan) if name in STATISTICS else np.zeros(self.total, np.int64)
        return array_of(self.columns[name])


def segment_grid(
    files: Files, name: str, outline: Outline, stat: Stat, steps: Ints | None = None, phase: str = ""
) -> FileGrid | None:  # fmt: skip
    """Return a sealed segment; None when it has no record that the statistic is about.

    With a phase only its rows count, and `steps` are the steps that it has in this segment.
    """
    steps = expanded(outline.steps) if steps is None else steps
    if not _any_port(outline, stat) or not len(steps):
        return None
    mixed = phase if len(outline.phases) > 1 else ""
    with pq.ParquetFile(_source(files, name), read_dictionary=list(_WORDS), page_checksum_verification=True) as file:
        zero = zero_columns(file.metadata, (*NONFINITE, "recomputed"))
        wanted = ["step", *stat.columns, *NONFINITE, "recomputed", *(["numbers"] if stat.number else [])]
        ordered = _ordered(outline)
        wanted += [] if ordered else _WORDS
        wanted += ["phase"] if mixed else []
        table = file.read([name for name in dict.fromkeys(wanted) if name not in zero], use_threads=False)
    places, place = ordered or _places(table)
    if mixed:
        keep = pc.equal(table["phase"], phase)
        table, place = table.filter(keep), place[array_of(keep)]
    return _grid(FileRows(table, places, place, len(table)), steps, stat)


def tail_grid(table: Any, stat: Stat) -> FileGrid | None:
    """Return the rows of a tail, as `read_tail` gives them."""
    places, place = _places(table)
    return _grid(FileRows(table, places, place, len(table)), np.unique(array_of(table["step"])), stat)


def _source(files: Files, name: str) -> Any:
    return files.path(name) if files.local is not None else files.open(name)


def _any_port(outline: Outline, stat: Stat) -> bool:
    return bool(outline.rows) and (not stat.ports or any(place[1] in stat.ports for place in outline.places))


def _ordered(outline: Outline) -> tuple[ColumnPlaces, Ints] | None:
    """Return which rows are whose in a segment that was folded: it is sorted by place."""
    if not outline.replaces:
        return None
    places, counts = _sorted_places(ByIdentity(outline.places))
    return (places, np.repeat(np.arange(len(counts)), counts)) if counts.sum() == outline.rows else None


class ByIdentity(NamedTuple):
    """A list by identity: segments of one run mostly share theirs."""

    places: list[tuple[str, str, str, str, int, int]]

    def __hash__(self) -> int:
        return id(self.places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.places is other.places


@functools.lru_cache(maxsize=64)
def _sorted_places(same: ByIdentity) -> tuple[ColumnPlaces, Ints]:
    counts: dict[Triple, int] = {}
    for site, port, slot, _, _, count in same.places:
        counts[site, port, slot] = counts.get((site, port, slot), 0) + count
    triples = sorted(counts)
    return ColumnPlaces(triples), np.array([counts[triple] for triple in triples], np.int64)


def _places(table: Any) -> tuple[ColumnPlaces, Ints]:
    """Return the places of rows, from their words."""
    places, place = places_in(table, _WORDS)
    return _columns_of(places), place


@functools.lru_cache(maxsize=64)
def _columns_of(places: tuple[tuple[str, ...], ...]) -> ColumnPlaces:
    """Return the places of a grid: the same object for files that hold the same places."""
    return ColumnPlaces([(site, port, slot) for site, port, slot in places])


def _grid(rows: FileRows, steps: Ints, stat: Stat) -> FileGrid | None:
    keep = _counted(rows, stat)
    step, place = array_of(rows.columns["step"]), rows.place
    values = stat.of({name: rows.number(name) for name in stat.columns} | _numbers(rows, stat))
    bad = _bad(rows)
    if keep is not None:
        step, place, values = step[keep], place[keep], values[keep]
        bad = None if bad is None else bad[keep]
    if not len(values):
        return None
    cell = np.searchsorted(steps, step) if steps[-1] - steps[0] >= len(steps) else step - steps[0]
    shape = (len(steps), len(rows.places.triples))
    return FileGrid(rows.places, steps, scattered(cell * shape[1] + place, values, bad, shape))


def _counted(rows: FileRows, stat: Stat) -> npt.NDArray[np.bool_] | None:
    """Return which rows count; None: all of them."""
    again = "recomputed" in rows.columns.column_names
    keep = ~rows.number("recomputed").astype(bool) if again else None
    if stat.ports:
        right = np.array([port in stat.ports for _, port, _ in rows.places.triples], bool)[rows.place]
        keep = right if keep is None else keep & right
    return None if keep is not None and keep.all() else keep


def _bad(rows: FileRows) -> npt.NDArray[np.bool_] | None:
    """Return which rows have something that is not finite; None: none has."""
    read = [rows.number(name) for name in NONFINITE if name in rows.columns.column_names]
    return np.any([count > 0 for count in read], axis=0) if read else None


def _numbers(rows: FileRows, stat: Stat) -> dict[str, npt.NDArray[Any]]:
    """Return a number that a reducer gave under a name; NaN where it gave none."""
    if not stat.number:
        return {}
    found = pc.map_lookup(rows.columns["numbers"], pa.scalar(stat.number), "first")
    return {stat.number: array_of(found)}
