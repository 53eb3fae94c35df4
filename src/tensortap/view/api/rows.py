"""Read the records of some places, or of some steps, from every file that has any."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tensortap.store.arrays import array_of, empty_table, encoded
from tensortap.store.blocks import BlockSource, RowBlock, blocks, left_out, read_or_mark
from tensortap.store.catalog import PLAIN_RECORDS, Outline, derive_missing
from tensortap.store.filters import all_of, any_place
from tensortap.store.queries import sealed_rows
from tensortap.store.snapshot import Snapshot, Triple
from tensortap.types import Place
from tensortap.view.api.file_grid import ByIdentity

SHAPE: Final = ("hist_offset", "hist_counts")
_BYTES: Final = 1000  # of a record, where no file tells
ReadColumns = Callable[[Sequence[str], int, int], Any]  # columns of one place's records, from a step to another


def rows_of(
    snapshot: Snapshot, columns: Sequence[str], *, places: Sequence[Triple] = (), first: int = 0,
    last: int = 1 << 62, ports: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Return columns of the records of places, or of all, by step; what was recomputed is left out."""
    step = pc.field("step")
    chosen = all_of(
        [
            any_place(Place(*triple) for triple in places) if places else None,
            (step >= first) & (step <= last),
            pc.field("port").isin(list(ports)) if ports else None,
            ~pc.field("recomputed"),
            pc.field("phase") == snapshot.phase if snapshot.phase else None,
        ]
    )
    wanted = frozenset(places)
    sealed = [(name, outline) for source in snapshot.records for name, outline in source.segments.items()]
    names = [name for name, outline in sealed if _has(outline, wanted, first, last)]
    tails = [table.filter(chosen) for table in snapshot.tail_rows(snapshot.records, PLAIN_RECORDS)]
    tables = [derive_missing(table, columns) for table in tails]
    tables += sealed_rows(snapshot, names, PLAIN_RECORDS, columns, chosen)
    return pa.concat_tables(tables or [empty_table(PLAIN_RECORDS).select(columns)]).sort_by("step")


def of_place(snapshot: Snapshot, place: Triple) -> ReadColumns:
    """Return a place's records, read when they are asked for."""
    return lambda columns, first, last: rows_of(snapshot, columns, places=[place], first=first, last=last)


def by_place(
    snapshot: Snapshot, columns: Sequence[str], places: Sequence[Triple], steps: Sequence[int] | None = None,
    histograms: Sequence[int] | None = None,
) -> Iterator[tuple[Triple, ReadColumns]]:  # fmt: skip
    """Yield many places' records, read in one pass over the files and held in memory; all, or those of `steps`.

    With `histograms`, a list of steps, those of other steps are not read: they are null.
    """
    number = {triple: i for i, triple in enumerate(places)}
    plain = list(columns) if histograms is None else [name for name in columns if name not in SHAPE]
    tables, found = [], []
    for block in blocks(snapshot, plain, chosen=lambda p: p[:3] in number, steps=steps, recomputed=False):
        table = block.table(plain)
        tables.append(table if histograms is None else _with_histograms(snapshot, block, table, histograms))
        found.append(np.array([number[place[:3]] for place in block.places], np.int64)[block.place])
    rows = pa.concat_tables(tables) if tables else empty_table(PLAIN_RECORDS).select(columns)
    place = np.concatenate(found) if found else np.zeros(0, np.int64)
    order = np.lexsort((array_of(rows["step"]), place))
    rows, ends = rows.take(pa.array(order)), np.cumsum(np.bincount(place, minlength=len(places)))
    for triple, end, count in zip(places, ends.tolist(), np.diff(ends, prepend=0).tolist(), strict=True):
        yield triple, functools.partial(_between, rows.slice(end - count, count))


def _with_histograms(snapshot: Snapshot, block: RowBlock, table: Any, steps: Sequence[int]) -> Any:
    """Return the rows of a block with their histograms at some steps, and null at the others."""
    chosen = np.flatnonzero(np.isin(block.number("step"), steps))
    rows = chosen if block.rows is None else block.rows[chosen]
    read = functools.partial(block.source.take, rows, SHAPE)
    shapes = read_or_mark(snapshot, block.source, read) if len(rows) else empty_table(PLAIN_RECORDS)
    if shapes is None:
        raise left_out(block.source)
    at = np.full(len(block), -1)
    at[chosen] = np.arange(len(chosen))
    taken = shapes.select(SHAPE).take(pa.array(at, mask=at < 0))
    for name in SHAPE:
        table = table.append_column(PLAIN_RECORDS.field(name), taken[name])
    return table


def rows_where(
    snapshot: Snapshot, source: BlockSource, name: str, values: Collection[Any], columns: Sequence[str]
) -> list[Any]:  # fmt: skip
    """Return columns of one file's rows in which `name` is one of `values`: a table, or none of a damaged file.

    Without Arrow's data sets and expressions: those import pandas, for which the first request would wait.
    """

    def read() -> Any:
        rows = np.flatnonzero(_is_one_of(source.read([name])[name], values))
        return source.take(rows, columns).select(list(columns))

    table = read_or_mark(snapshot, source, read)
    return [] if table is None else [table]


def _is_one_of(column: Any, values: Collection[Any]) -> npt.NDArray[np.bool_]:
    known = encoded(column)
    chosen = np.array([value in values for value in known.dictionary.to_pylist()] or [False], bool)
    return np.asarray(chosen[array_of(known.indices)] & array_of(known.is_valid()))


def bytes_per_record(snapshot: Snapshot) -> int:
    """Return how much memory a record takes, judged by one file."""
    for files in snapshot.records:
        for name, outline in files.segments.items():
            if outline.rows:
                with snapshot.files.open(name) as file:
                    groups = pq.ParquetFile(file).metadata
                    size = sum(groups.row_group(i).total_byte_size for i in range(groups.num_row_groups))
                return int(size) // outline.rows + 1
    return _BYTES


def _between(table: Any, columns: Sequence[str], first: int, last: int) -> Any:
    low, high = np.searchsorted(table["step"].to_numpy(), [first, last + 1])
    return table.select(list(columns)).slice(low, high - low)


def _has(outline: Outline, places: frozenset[Triple], first: int, last: int) -> bool:
    inside = any(run[0] <= last and run[1] >= first for run in outline.steps)
    return inside and (not places or not places.isdisjoint(_triples(ByIdentity(outline.places))))


@functools.lru_cache(maxsize=64)
def _triples(same: ByIdentity) -> frozenset[Triple]:
    return frozenset((site, port, slot) for site, port, slot, *_ in same.places)
