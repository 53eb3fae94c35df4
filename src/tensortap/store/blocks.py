"""Read records file by file, as arrays: a run of any length passes through memory in blocks.

Words (site, port, …) stay dictionary codes, and a count of which the footer says "all zero" is known without reading.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tensortap.reduce.statistics import BY_NAME, NUMBERS, STATISTICS, with_sources
from tensortap.store.arrays import Ints, array_of, arrow_of, empty_table, encoded, numbered
from tensortap.store.catalog import MOSTLY_ZERO, PLAIN_RECORDS, Outline, derive_missing, plain_rows
from tensortap.store.filters import StepSelection, step_test
from tensortap.store.footer import null_columns, zero_columns
from tensortap.store.schema import WORDS
from tensortap.store.snapshot import Snapshot
from tensortap.store.tail_reader import possible_rows
from tensortap.types import Place

S = TypeVar("S")
T = TypeVar("T")
_MAY_BE_ZERO: Final = frozenset(MOSTLY_ZERO)
_KEYS: Final = ("step", "seq", "site", "port", "slot", "op")
_DAMAGE: Final = (OSError, ValueError, TypeError, KeyError, pa.ArrowException)
_READERS: Final = 2
_SHORT_ROWS: Final = 1 << 16  # rows without long lists that are decoded together
AT_ONCE: Final = 1 << 12  # rows of lists that are decoded together: with histograms some megabytes


class BlockSource(NamedTuple):
    """A file of records: its rank, how many it holds, its first and last step, and how to read it.

    `read` gives columns of all rows, `take` columns of some rows in the types of the plain schema, with the rank.
    `places` are those that its footer names; None where that is not known.
    """

    name: str | Path
    rank: int
    rows: int
    first: int
    last: int
    read: Callable[[Sequence[str]], Any]
    take: Callable[[Ints, Sequence[str]], Any]
    places: Sequence[tuple[Any, ...]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Rows of one file. `rows` are their numbers in the file, None for all; `place` are numbers into `places`."""

    source: BlockSource
    columns: Any
    places: tuple[Place, ...]
    place: Ints
    rows: Ints | None

    def number(self, name: str) -> npt.NDArray[Any]:
        """Return a column of numbers, NaN where it has none."""
        return numbers(self.columns, name)

    def __len__(self) -> int:
        return len(self.place)

    def table(self, columns: Sequence[str]) -> Any:
        """Return columns in the plain schema; what an older version did not write is null."""
        return pa.table({name: self._plain(name) for name in columns})

    def _plain(self, name: str) -> Any:
        kind = PLAIN_RECORDS.field(name).type
        if name == "rank":
            return arrow_of(np.full(len(self), self.source.rank, np.int32))
        if name in NUMBERS or name in _MAY_BE_ZERO:
            return arrow_of(self.number(name)).cast(kind)
        known = name in self.columns.column_names
        return self.columns[name].cast(kind) if known else pa.nulls(len(self), kind)


def sources(snapshot: Snapshot) -> list[BlockSource]:
    """Return the files of records, the earliest steps first."""
    found = []
    for files in snapshot.records:
        for name, outline in files.segments.items():
            if outline.steps:
                read = functools.partial(_read_segment, snapshot, name)
                take = functools.partial(_take_from_segment, snapshot, name, files.rank)
                found.append(
                    BlockSource(name, files.rank, outline.rows, *_span(outline), read, take, outline.places or None)
                )
    for files in snapshot.records:
        for path in files.tails:
            if path in snapshot.tails and len(table := snapshot.tails[path]):
                steps = pc.min_max(table["step"]).as_py()
                read = functools.partial(_read_table, table)
                take = functools.partial(_take_from_table, table, files.rank)
                found.append(BlockSource(path, files.rank, len(table), steps["min"], steps["max"], read, take))
    return sorted(found, key=lambda source: (source.first, source.rank, str(source.name)))


def _span(outline: Outline) -> tuple[int, int]:
    return min(first for first, _, _ in outline.steps), max(last for _, last, _ in outline.steps)


def blocks(
    snapshot: Snapshot, columns: Sequence[str], *, chosen: Callable[[Place], bool] = lambda place: True,
    steps: StepSelection = None, phase: str | None = None, recomputed: bool = True,
) -> Iterator[RowBlock]:  # fmt: skip
    """Yield the records of the places that are `chosen`, file by file.

    Files without any of the steps, or any of the places, are not opened. One that cannot be read is left out and
    counted.
    """
    wanted, phase = step_array(snapshot, steps), phase or snapshot.phase or None
    names = [*columns, *(["phase"] if phase else ()), *(() if recomputed else ["recomputed"])]
    choice = PerPlace(chosen, bool)

    def read(source: BlockSource) -> RowBlock | None:
        block = read_block(snapshot, source, names)
        return None if block is None else _chosen_rows(block, choice, wanted, phase, recomputed)

    found = [s for s in _overlapping(sources(snapshot), wanted) if s.places is None or choice.of(s.places).any()]
    with ThreadPoolExecutor(_READERS, "tensortap-read") as pool:
        for block in ahead(pool, read, found, _READERS + 1):
            if block is not None and len(block):
                yield block


def read_block(snapshot: Snapshot, source: BlockSource, columns: Sequence[str]) -> RowBlock | None:
    """Return the rows of one file; None when it cannot be read, which is counted."""
    names = list(dict.fromkeys((*_KEYS, *columns)))
    found: RowBlock | None = read_or_mark(snapshot, source, lambda: _block(source, source.read(names)))
    return found


def read_or_mark(snapshot: Snapshot, source: BlockSource, read: Callable[[], Any]) -> Any:
    """Return what `read` gives; None when the file turns out to be damaged, which is counted.

    Who has used rows of it already raises `left_out` then, and is asked again with a snapshot without the file.
    """
    try:
        return read()
    except FileNotFoundError:
        raise
    except _DAMAGE as error:
        snapshot.catalog.mark_damaged(source.name, error)
        return None


def left_out(source: BlockSource) -> FileNotFoundError:
    """Return the error that makes readers take another snapshot: as if the damaged file were gone."""
    return FileNotFoundError(f"{source.name} is damaged: it is left out")


def step_array(snapshot: Snapshot, steps: StepSelection) -> Ints | None:
    """Return the recorded steps that are meant, in order; None for all of them."""
    if steps is None:
        return None
    test = step_test(steps)
    return np.array([step for step in snapshot.steps.tolist() if test(step)], np.int64)


def _overlapping(found: Iterable[BlockSource], wanted: Ints | None) -> list[BlockSource]:
    if wanted is None:
        return list(found)
    return [s for s in found if np.searchsorted(wanted, s.first) < np.searchsorted(wanted, s.last, "right")]


def ahead(pool: ThreadPoolExecutor, work: Callable[[S], T], items: Iterable[S], most: int) -> Iterator[T]:
    """Yield the results in order, a few being made while one is used: never more than that are in memory."""
    waiting: deque[Future[T]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _block(source: BlockSource, table: Any) -> RowBlock:
    rows = None
    possible = possible_rows(table, _KEYS)
    if len(possible) < len(table):
        numbered = table.append_column("row", arrow_of(np.arange(len(table))))
        possible = possible_rows(numbered, _KEYS)
        rows = array_of(possible["row"])
    places, place = places_in(possible)
    return RowBlock(source, possible, _as_places(places), place, rows)


@functools.lru_cache(maxsize=64)
def _as_places(places: tuple[tuple[str, ...], ...]) -> tuple[Place, ...]:
    return tuple(Place(*place) for place in places)


class PerPlace:
    """An answer for each place of a list, computed once for several equal lists in a row, as files share them."""

    def __init__(self, ask: Callable[[Place], Any], dtype: Any) -> None:
        self._ask = ask
        self._dtype = dtype
        self._last: tuple[Sequence[Any], npt.NDArray[Any]] = (), np.zeros(0, dtype)

    def of(self, places: Sequence[Any]) -> npt.NDArray[Any]:
        """Return the answer for each place."""
        known, found = self._last
        if known is not places:
            found = np.array([self._ask(Place(*place[:4])) for place in places], self._dtype)
            self._last = places, found
        return found


def _chosen_rows(
    block: RowBlock, choice: PerPlace, steps: Ints | None, phase: str | None, recomputed: bool
) -> RowBlock:
    keep = choice.of(block.places)[block.place]
    if steps is not None:
        keep &= np.isin(block.number("step"), steps)
    if phase is not None:
        keep &= _equal(block.columns["phase"], phase)
    if not recomputed and "recomputed" in block.columns.column_names:
        keep &= ~block.number("recomputed").astype(bool)
    if keep.all():
        return block
    rows = np.flatnonzero(keep)
    present, place = numbered(block.place[rows], len(block.places))
    every = len(present) == len(block.places)  # the same object then, as other files have it
    return replace(
        block, columns=block.columns.take(arrow_of(rows)), place=place,
        places=block.places if every else tuple(block.places[i] for i in present.tolist()),
        rows=rows if block.rows is None else block.rows[rows],
    )  # fmt: skip


def _equal(column: Any, word: str) -> npt.NDArray[np.bool_]:
    known = encoded(column)
    is_word = np.array([name == word for name in known.dictionary.to_pylist()] or [False], bool)
    return np.asarray(is_word[array_of(known.indices)])


def open_segment(snapshot: Snapshot, name: str) -> Any:
    """Return a sealed segment as a Parquet file, to be closed; words stay dictionary codes."""
    files = snapshot.files
    files.check(name)
    source = files.path(name) if files.local is not None else files.open(name)
    return pq.ParquetFile(source, read_dictionary=list(WORDS), page_checksum_verification=True)


def _read_segment(snapshot: Snapshot, name: str, columns: Sequence[str]) -> Any:
    with open_segment(snapshot, name) as file:
        absent = zero_columns(file.metadata, [n for n in columns if n in _MAY_BE_ZERO])
        absent |= null_columns(file.metadata, [n for n in columns if n == "hash"])
        known = set(file.schema_arrow.names)
        wanted = [n for n in with_sources(columns) if n in known and n not in absent]
        return cast_plain(file.read(wanted, use_threads=False))


def _take_from_segment(snapshot: Snapshot, name: str, rank: int, rows: Ints, columns: Sequence[str]) -> Any:
    """Return some rows; only the row groups that hold them are read, up to the last of them."""
    with open_segment(snapshot, name) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        ends = np.cumsum(sizes)
        group = np.searchsorted(ends, rows, "right")
        wanted = np.unique(group)
        starts = np.cumsum([0, *(sizes[i] for i in wanted.tolist())])[:-1]
        known = [n for n in with_sources(columns) if n in file.schema_arrow.names]
        at = rows - (ends - sizes)[group] + starts[np.searchsorted(wanted, group)]
        return _in_plain_schema(_rows_at(file, wanted.tolist(), known, at), rank, columns)


def _rows_at(file: Any, groups: list[int], columns: list[str], at: Ints) -> Any:
    """Return some rows of row groups: of lists a few thousand are held at once, and none is decoded behind the last."""
    order, start, taken = np.argsort(at, kind="stable"), 0, []
    size = AT_ONCE if "hist_counts" in columns or "numbers" in columns else _SHORT_ROWS
    for batch in file.iter_batches(size, groups, columns, use_threads=False) if len(at) else ():
        low, high = np.searchsorted(at, (start, start + len(batch)), sorter=order)
        if low < high:
            taken.append(batch.take(arrow_of(at[order[low:high]] - start)))
        start += len(batch)
        if high == len(at):
            break
    table = pa.Table.from_batches(taken) if taken else empty_table(file.schema_arrow).select(columns)
    return table if (order[1:] > order[:-1]).all() else table.take(arrow_of(np.argsort(order)))


def _take_from_table(table: Any, rank: int, rows: Ints, columns: Sequence[str]) -> Any:
    table = table.select([n for n in with_sources(columns) if n in table.column_names])
    return _in_plain_schema(table.take(arrow_of(rows)), rank, columns)


def _in_plain_schema(table: Any, rank: int, columns: Sequence[str]) -> Any:
    wanted = {"rank", *columns}
    schema = pa.schema([field for field in PLAIN_RECORDS if field.name in wanted.union(with_sources(columns))])
    return derive_missing(plain_rows(table, rank, schema), [name for name in schema.names if name in wanted])


def _read_table(table: Any, columns: Sequence[str]) -> Any:
    return cast_plain(table.select([name for name in with_sources(columns) if name in table.column_names]))


def cast_plain(table: Any) -> Any:
    """Return the columns in the types that readers expect; a damaged file may have others."""
    for i, field in enumerate(table.schema):
        plain = PLAIN_RECORDS.field(field.name).type
        if field.name not in WORDS and field.type != plain:
            table = table.set_column(i, field.name, table[field.name].cast(plain))
    return table


def numbers(table: Any, name: str) -> npt.NDArray[Any]:
    """Return a column of a table, derived from others where an older version wrote none; zero where none is left."""
    present = name in table.column_names
    known = BY_NAME.get(name)
    if known is not None and known.derive is not None and (not present or table[name].null_count):
        derived = known.derive({source: array_of(table[source]) for source in known.sources})
        return np.where(np.isnan(own := array_of(table[name])), derived, own) if present else np.asarray(derived)
    if present:
        return array_of(table[name])
    return np.full(len(table), np.nan) if name in STATISTICS else np.zeros(len(table), np.int64)


def places_in(table: Any, names: Sequence[str] = Place._fields) -> tuple[tuple[tuple[str, ...], ...], Ints]:
    """Return the places of rows as combinations of words, and for each row which of them it is."""
    words, code = [], np.zeros(len(table), np.int64)
    for name in names:
        column = encoded(table[name])
        words.append(tuple(column.dictionary.to_pylist()) or ("",))
        if len(words[-1]) > 1:
            code = code * len(words[-1]) + array_of(column.indices)
    present, place = numbered(code, math.prod(map(len, words)))
    return _named(tuple(words), present.tobytes()), place


@functools.lru_cache(maxsize=64)
def _named(words: tuple[tuple[str, ...], ...], present: bytes) -> tuple[tuple[str, ...], ...]:
    """Return numbered combinations of words: the same object for files that hold the same places."""
    at = np.unravel_index(np.frombuffer(present, np.int64), [len(known) for known in words])
    names = [[known[i] for i in column.tolist()] for known, column in zip(words, at, strict=True)]
    return tuple(zip(*names, strict=True))
