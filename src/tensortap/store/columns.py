"""Columns of many records, sorted by place and step, each read when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.reduce.statistics import COUNTS, NUMBERS
from tensortap.store.arrays import Ints
from tensortap.store.blocks import BlockSource, PerPlace, RowBlock, numbers
from tensortap.store.snapshot import Snapshot
from tensortap.types import Place

Floats = npt.NDArray[np.float64]


class SingleRows:
    """Rows with one record for each place and step: `parts` has the range of each place in every column.

    A column is a few bytes a record, so that a long run is held a column at a time instead of whole.
    """

    def __init__(self, snapshot: Snapshot, steps: Ints) -> None:
        self.steps = steps  # in the order of the columns, after `arrange`
        self.parts: dict[Place, slice] = {}
        self._snapshot = snapshot
        self._known = steps
        self._places: dict[Place, int] = {}
        self._numbers = PerPlace(lambda place: self._places.setdefault(place, len(self._places)), np.int64)
        self._read: list[tuple[BlockSource, Ints | None]] = []
        self._keys: list[Ints] = []
        self._target: Ints = np.zeros(0, np.int64)
        self._columns: dict[str, Floats] = {}

    def add(self, block: RowBlock) -> None:
        """Take the rows of a block: only which they are, not what they hold."""
        at = np.searchsorted(self._known, block.number("step"))
        self._keys.append(self._numbers.of(block.places)[block.place] * len(self._known) + at)
        self._read.append((block.source, block.rows))

    def arrange(self) -> bool:
        """Find the order of the rows; False when a place has several at a step."""
        keys = np.concatenate(self._keys) if self._keys else np.zeros(0, np.int64)
        self._keys.clear()
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        if (np.diff(keys) == 0).any():
            return False
        self._target = np.empty(len(order), np.int32)
        self._target[order] = np.arange(len(order), dtype=np.int32)
        place, at = np.divmod(keys, max(len(self._known), 1))
        self.steps = self._known[at]
        ends = np.searchsorted(place, np.arange(len(self._places) + 1))
        self.parts = {name: slice(int(ends[i]), int(ends[i + 1])) for name, i in self._places.items()}
        return True

    def column(self, name: str) -> Floats:
        """Return a column, place by place, each by step."""
        if name not in self._columns:
            self._columns[name] = self._filled(name)
        return self._columns[name]

    def _filled(self, name: str) -> Floats:
        column: Floats | None = None
        start = 0
        for source, rows in self._read:
            table = self._table(source, name)
            count = len(table) if rows is None else len(rows)
            if table.num_columns or name not in COUNTS:  # else it is zero throughout
                values = numbers(table, name)
                if column is None:
                    column = np.zeros(len(self._target))
                column[self._target[start : start + count]] = values if rows is None else values[rows]
            start += count
        return np.broadcast_to(np.zeros(1), len(self._target)) if column is None else column

    def _table(self, source: BlockSource, name: str) -> Any:
        try:
            return source.read([name])
        except FileNotFoundError:
            raise
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
            self._snapshot.catalog.mark_damaged(source.name, error)
            raise FileNotFoundError(f"{source.name} cannot be read: take another snapshot, without it") from error


class PlaceColumns(Mapping[str, Floats]):
    """The columns of one place: its part of columns that hold every place."""

    def __init__(self, rows: SingleRows, part: slice) -> None:
        self._rows = rows
        self._part = part

    def __getitem__(self, name: str) -> Floats:
        if name not in NUMBERS:
            raise KeyError(name)
        return self._rows.column(name)[self._part]

    def __iter__(self) -> Iterator[str]:
        return iter(NUMBERS)

    def __len__(self) -> int:
        return len(NUMBERS)
