"""Read shards: a window of them at a time, mixed, as batches of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from tensortap.errors import HarvestError
from tensortap.harvest.dtypes import NATIVE
from tensortap.harvest.plan import SitePlan
from tensortap.harvest.rows import Array, Ints, gathered
from tensortap.harvest.shard_file import ShardFile, VectorRun
from tensortap.harvest.shards import INDICES, VALUES, shard_name
from tensortap.reduce import kernel
from tensortap.store.files import Files

_WINDOW: Final = 0.6  # of the memory: the rest is for the columns that are decoded and for the batches
_PLACES: Final = ("sample", "position", "token")


class ShardKey(NamedTuple):
    """A shard of every site: the part it belongs to and its number in it."""

    part: int
    number: int
    rows: int


class VectorColumn(NamedTuple):
    """A column of vectors: of which site, what it is called in the file, and what a vector is made of."""

    site: SitePlan
    name: str
    dtype: np.dtype[Any]
    width: int

    @property
    def size(self) -> int:
        """The bytes of one vector."""
        return self.dtype.itemsize * self.width


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows in random order: their values by site, and where each comes from."""

    arrays: dict[str, Array]
    sample: Ints
    position: Ints
    token: Ints
    indices: dict[str, Array]

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, site: str) -> Array:
        return self.arrays[site]

    @property
    def values(self) -> Array:
        """The values, [rows, width], where one site is read."""
        if len(self.arrays) > 1:
            raise HarvestError(
                f"there are {len(self.arrays)} sites in the batch: write batch[{next(iter(self.arrays))!r}]"
            )
        return next(iter(self.arrays.values()))


class ShardReader:
    """Read some sites of a harvest, row by row aligned."""

    def __init__(self, files: Files, sites: list[SitePlan]) -> None:
        self._files = files
        self._sites = sites
        self._columns = [VectorColumn(site, VALUES, NATIVE[site.dtype], site.width) for site in sites]
        self._columns += [VectorColumn(s, INDICES, np.dtype(np.int32), s.indices) for s in sites if s.indices]
        self._bytes_per_row = sum(column.size + 8 for column in self._columns) + 8 * len(_PLACES) + 8

    def batches(
        self, keys: list[ShardKey], size: int, seed: int | None, memory: int, share: tuple[int, int], drop_last: bool
    ) -> Iterator[RowBatch]:
        """Yield batches of the rows of this reader's share of the shards, in random order."""
        random = None if seed is None else np.random.default_rng(seed)
        order = np.arange(len(keys)) if random is None else random.permutation(len(keys))
        mine = [keys[i] for i in order[share[0] :: share[1]]]
        if random is not None:
            random = np.random.default_rng([seed or 0, share[0]])
        rest: RowBatch | None = None
        for window in windows(mine, int(memory * _WINDOW), self._bytes_per_row):
            rows = self._window(window, rest)
            for key in window:
                self._add(rows, key)
            mix = np.arange(len(rows)) if random is None else random.permutation(len(rows))
            whole = len(rows) - len(rows) % size
            for start in range(0, whole, size):
                yield rows.take(mix[start : start + size])
            rest = rows.take(mix[whole:]) if whole < len(rows) else None
        if rest is not None and not drop_last:
            yield rest

    def _window(self, keys: list[ShardKey], before: RowBatch | None) -> Window:
        try:
            return Window(self._columns, keys, before)
        except (MemoryError, ValueError) as error:
            rows = sum(key.rows for key in keys)
            raise HarvestError(f"there is no memory for the {rows} rows that the manifest names: {error}") from error

    def _add(self, window: Window, key: ShardKey) -> None:
        for n, site in enumerate(self._sites):
            path = self._files.path(f"data/{site.folder}/{shard_name(key.part, key.number)}")
            shard = ShardFile(self._files, path)
            table = shard.columns(list(_PLACES))
            if len(table) != key.rows:
                raise HarvestError(f"{path} is damaged: it must have {key.rows} rows, got {len(table)}")
            places = [table[name].fill_null(-1).to_numpy() for name in _PLACES]
            if not n:
                window.add_places(places)
            elif not all(np.array_equal(a, b) for a, b in zip(window.last_places(), places, strict=True)):
                raise HarvestError(f"{site.site} does not have the same rows as the others: read one site at a time")
            for number, column in enumerate(self._columns):
                if column.site is site:
                    runs = shard.runs(column.name, column.size)
                    if sum(run.rows for run in runs) != key.rows:  # every address must be a row's
                        raise HarvestError(f"{path} is damaged: {column.name} must have {key.rows} rows")
                    window.add_vectors(number, runs)


class Window:
    """The rows of several shards: where each comes from, and where its vectors lie. No vector is copied.

    The numbers of a row lie beside each other, so that a random row costs one wait for memory, and not one for each.
    """

    def __init__(self, columns: list[VectorColumn], keys: list[ShardKey], before: RowBatch | None) -> None:
        total = sum(key.rows for key in keys) + (0 if before is None else len(before))
        self._columns = columns
        self._numbers = np.empty((total, len(_PLACES) + len(columns)), np.int64)  # a row's places, then its addresses
        self._filled = [0] * len(columns)
        self._ends = [0]
        self._owners: list[Any] = []
        if before is not None:
            self._begin_with(before)

    def __len__(self) -> int:
        return len(self._numbers)

    def add_places(self, places: list[Ints]) -> None:
        """Add where the rows of a shard come from."""
        begin, end = self._ends[-1], self._ends[-1] + len(places[0])
        for number, some in enumerate(places):
            self._numbers[begin:end, number] = some
        self._ends.append(end)

    def last_places(self) -> list[Ints]:
        """Return what `add_places` was given last."""
        return [self._numbers[self._ends[-2] : self._ends[-1], number] for number in range(len(_PLACES))]

    def add_vectors(self, column: int, runs: list[VectorRun]) -> None:
        """Add where the vectors of a column of the shard lie."""
        step, at = self._columns[column].size, len(_PLACES) + column
        for run in runs:
            begin, end = self._filled[column], self._filled[column] + run.rows
            self._numbers[begin:end, at] = np.arange(run.rows, dtype=np.int64) * step + run.address
            self._filled[column] = end
            self._owners.append(run.owner)

    def take(self, rows: Ints) -> RowBatch:
        """Return some rows, copied."""
        made: dict[str, dict[str, Array]] = {VALUES: {}, INDICES: {}}
        sample, position, token, *addresses = np.ascontiguousarray(gathered(self._numbers, rows).T)
        for column, where in zip(self._columns, addresses, strict=True):
            out = np.empty((len(rows), column.width), column.dtype)
            gather(out, where)
            made[column.name][column.site.site] = out
        return RowBatch(made[VALUES], sample, position, token, made[INDICES])

    def _begin_with(self, before: RowBatch) -> None:
        """Add the rows that the window before left over."""
        self.add_places([before.sample, before.position, before.token])
        for number, column in enumerate(self._columns):
            held = before.arrays if column.name == VALUES else before.indices
            array = held[column.site.site]
            self.add_vectors(number, [VectorRun(array.ctypes.data, len(before), array)])


def windows(keys: list[ShardKey], memory: int, per_row: int) -> Iterator[list[ShardKey]]:
    """Yield groups of shards whose rows fit into a number of bytes; a larger shard is a group by itself."""
    group: list[ShardKey] = []
    rows = 0
    for key in keys:
        if group and (rows + key.rows) * per_row > memory:
            yield group
            group, rows = [], 0
        group.append(key)
        rows += key.rows
    if group:
        yield group


def gather(out: Array, addresses: Ints) -> None:
    """Copy a row from each address, in C where it was built."""
    size = out.itemsize * out.shape[1]
    if kernel.gather_rows is not None:
        kernel.gather_rows(out.ctypes.data, addresses.ctypes.data, len(addresses), size)
        return
    target = out.ctypes.data
    for number, address in enumerate(addresses.tolist()):
        ctypes.memmove(target + number * size, address, size)
