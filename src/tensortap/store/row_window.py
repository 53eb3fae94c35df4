"""Read one file of records forwards, a few thousand rows at a time: lists of long rows are never all in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tensortap.store.blocks import AT_ONCE, BlockSource, cast_plain, open_segment
from tensortap.store.catalog import PLAIN_RECORDS
from tensortap.store.snapshot import Snapshot


class RowWindow:
    """Columns of one file, held only from the row that was last asked for on.

    Rows may be asked for again from the same row on; to go back further reads the file from its beginning.
    """

    def __init__(self, snapshot: Snapshot, source: BlockSource, columns: Sequence[str]) -> None:
        self._snapshot = snapshot
        self._source = source
        self._columns = list(columns)
        self._begin()

    def _begin(self) -> None:
        self._batches = _batches(self._snapshot, self._source, self._columns)
        self._held: list[Any] = []
        self._start = 0  # the row of the file with which what is held begins
        self._end = 0

    def rows(self, low: int, high: int) -> Any:
        """Return the rows from `low` to before `high`; a column that an older version did not write is null."""
        if low < self._start:
            self._begin()
        while self._end < high:
            self._held.append(next(self._batches))
            self._end += len(self._held[-1])
            self._forget(low)
        self._forget(low)
        table = pa.concat_tables(self._held)
        return table.slice(low - self._start, high - low)

    def _forget(self, low: int) -> None:
        while self._held and self._start + len(self._held[0]) <= low:
            self._start += len(self._held.pop(0))


def _batches(snapshot: Snapshot, source: BlockSource, columns: list[str]) -> Iterator[Any]:
    """Yield the rows of a file from its beginning; raises ValueError at its end."""
    if isinstance(source.name, Path):  # a tail, which is in memory
        yield _complete(source.read(columns), columns)
    else:
        with open_segment(snapshot, source.name) as file:
            known = [name for name in columns if name in file.schema_arrow.names]
            for batch in file.iter_batches(AT_ONCE, columns=known, use_threads=False):
                yield _complete(cast_plain(pa.Table.from_batches([batch])), columns)
    raise ValueError("it has fewer rows than its footer says")


def _complete(table: Any, columns: list[str]) -> Any:
    for name in columns:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), PLAIN_RECORDS.field(name).type))
    return table.select(columns)
