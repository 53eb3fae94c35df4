"""Read shards: a window of them into memory, mixed, as batches of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensortap.errors import HarvestError
from tensortap.harvest.dtypes import NATIVE
from tensortap.harvest.plan import SitePlan
from tensortap.harvest.rows import Array, Ints
from tensortap.harvest.shards import INDICES, VALUES, shard_name
from tensortap.store.files import Files

_WINDOW: Final = 0.6  # of the memory: the rest is for the file that is being read and for the batch


class ShardKey(NamedTuple):
    """A shard of every site: the part it belongs to and its number in it."""

    part: int
    number: int
    rows: int


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

    def take(self, rows: Any) -> RowBatch:
        """Return some rows: by their numbers copied, by a slice as they lie there."""
        return RowBatch(
            {site: gathered(array, rows) for site, array in self.arrays.items()},
            self.sample[rows], self.position[rows], self.token[rows],
            {site: array[rows] for site, array in self.indices.items()},
        )  # fmt: skip


class ShardReader:
    """Reads some sites of a harvest, row by row aligned."""

    def __init__(self, files: Files, sites: list[SitePlan]) -> None:
        self._files = files
        self._sites = sites
        vectors = sum(NATIVE[site.dtype].itemsize * site.width + 4 * site.indices for site in sites)
        self._bytes_per_row = vectors + 24

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
            rows = self._read(window, rest)
            mix = None if random is None else random.permutation(len(rows))
            whole = len(rows) - len(rows) % size
            for start in range(0, whole, size):
                yield rows.take(_part(mix, start, start + size))
            rest = rows.take(_part(mix, whole, len(rows))) if whole < len(rows) else None
        if rest is not None and not drop_last:
            yield rest

    def _read(self, window: list[ShardKey], before: RowBatch | None) -> RowBatch:
        """Return the rows of several shards, with those that the window before left over."""
        total = sum(key.rows for key in window) + (0 if before is None else len(before))
        rows = empty_batch(total, self._sites)
        at = 0
        if before is not None:
            at = len(before)
            _copy(rows, slice(0, at), before)
        for key in window:
            for n, site in enumerate(self._sites):
                name = self._files.path(f"data/{site.folder}/{shard_name(key.part, key.number)}")
                table = read_table(self._files, name, ["sample", "position", "token", *_columns(site)])
                _fill(rows, slice(at, at + key.rows), table, site, first=n == 0)
            at += key.rows
        return rows


def read_table(files: Files, path: str, columns: list[str]) -> pa.Table:
    """Return some columns of a shard; raise if it is damaged."""
    try:
        if files.local is not None:
            return pq.read_table(path, columns=columns, memory_map=True, pre_buffer=False, partitioning=None)
        return pq.read_table(pa.BufferReader(files.fs.cat_file(path)), columns=columns)
    except FileNotFoundError:
        raise HarvestError(f"{path} is in the manifest and missing: the harvest is damaged") from None
    except pa.ArrowInvalid as error:
        raise HarvestError(f"{path} is damaged: {error}") from error


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


def empty_batch(rows: int, sites: list[SitePlan]) -> RowBatch:
    """Return memory for so many rows."""
    return RowBatch(
        {site.site: np.empty((rows, site.width), NATIVE[site.dtype]) for site in sites},
        np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.int64),
        {site.site: np.empty((rows, site.indices), np.int32) for site in sites if site.indices},
    )  # fmt: skip


def gathered(array: Array, rows: Any) -> Array:
    """Return rows of a matrix; those that are named by number are copied whole, which is faster than by elements."""
    if isinstance(rows, slice):
        return array[rows]
    whole = array.view(np.dtype((np.void, array.itemsize * array.shape[1]))).reshape(-1)
    return np.asarray(whole.take(rows).view(array.dtype).reshape(-1, array.shape[1]))


def _part(order: Ints | None, start: int, stop: int) -> Any:
    return slice(start, stop) if order is None else order[start:stop]


def vectors(column: pa.ChunkedArray, dtype: np.dtype[Any], width: int) -> Iterator[Array]:
    """Yield the vectors of a column of bytes, a block at a time, without copying them."""
    for chunk in column.chunks:
        if len(chunk):
            flat = np.frombuffer(chunk.buffers()[1], dtype, len(chunk) * width, chunk.offset * width * dtype.itemsize)
            yield flat.reshape(len(chunk), width)


def _fill(rows: RowBatch, where: slice, table: pa.Table, site: SitePlan, first: bool) -> None:
    _put(rows.arrays[site.site][where], vectors(table[VALUES], NATIVE[site.dtype], site.width))
    if site.indices:
        _put(rows.indices[site.site][where], vectors(table[INDICES], np.dtype(np.int32), site.indices))
    if first:
        for name, target in (("sample", rows.sample), ("position", rows.position), ("token", rows.token)):
            target[where] = table[name].fill_null(-1).to_numpy()
    elif not np.array_equal(rows.sample[where], table["sample"].to_numpy()):
        raise HarvestError(f"{site.site} does not have the same rows as the other sites: read one site at a time")


def _put(target: Array, blocks: Iterator[Array]) -> None:
    at = 0
    for block in blocks:
        target[at : at + len(block)] = block
        at += len(block)


def _copy(rows: RowBatch, where: slice, before: RowBatch) -> None:
    for site, array in before.arrays.items():
        rows.arrays[site][where] = array
    for site, array in before.indices.items():
        rows.indices[site][where] = array
    rows.sample[where], rows.position[where], rows.token[where] = before.sample, before.position, before.token


def _columns(site: SitePlan) -> list[str]:
    return [VALUES, INDICES] if site.indices else [VALUES]
