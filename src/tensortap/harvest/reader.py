"""Read a harvest: shuffled batches within a bounded memory, statistics, and the files for everybody else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensortap import text
from tensortap.errors import HarvestError, suggest
from tensortap.harvest.dtypes import NATIVE
from tensortap.harvest.folder import PLAN, Entry, HarvestFolder
from tensortap.harvest.plan import HarvestPlan, SitePlan, number_of_bytes
from tensortap.harvest.ray_engine import start_ray
from tensortap.harvest.rows import Array, Ints
from tensortap.harvest.shards import INDICES, VALUES
from tensortap.harvest.statistics import SiteStatistics

if TYPE_CHECKING:
    from tensortap.harvest.torch_dataset import HarvestDataset

_WINDOW = 0.6  # of the memory: the rest is for the file that is being read and for the batch


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
        """Return some rows, copied."""
        return RowBatch(
            {site: array[rows] for site, array in self.arrays.items()},
            self.sample[rows], self.position[rows], self.token[rows],
            {site: array[rows] for site, array in self.indices.items()},
        )  # fmt: skip


class Harvest:
    """A folder that `harvest` wrote, or is writing.

    >>> import torch, tempfile, tensortap
    >>> model, data = torch.nn.Linear(4, 3), [torch.ones(2, 4)] * 3
    >>> acts = tensortap.harvest(model, data, ":output", to=tempfile.mkdtemp() + "/acts", progress=False)
    >>> [batch.values.shape for batch in acts.batches(4, seed=0)]
    [(4, 3), (2, 3)]
    """

    def __init__(self, folder: HarvestFolder, about: dict[str, Any]) -> None:
        self.folder = folder
        self.about = about
        self.plan = HarvestPlan.of_json(about)
        self.entries: list[Entry] = folder.entries()

    def __repr__(self) -> str:
        state = "" if self.complete else ", not complete"
        return f"<Harvest {self.folder}: {text.counted(self.rows, 'row')}, {', '.join(self.sites)}{state}>"

    @property
    def path(self) -> str:
        """Where it lies."""
        return str(self.folder)

    @property
    def complete(self) -> bool:
        """Whether every part is committed."""
        return bool(self.about["complete"])

    @property
    def sites(self) -> list[str]:
        """The sites in the order in which the model reached them."""
        return [site.site for site in self.plan.sites]

    @property
    def rows(self) -> int:
        """How many rows are committed, of all sites together."""
        return sum(entry["rows"] for entry in self.entries)

    @property
    def samples(self) -> int:
        """How many samples are committed."""
        return sum(entry["samples"] for entry in self.entries)

    @property
    def set_aside(self) -> list[dict[str, Any]]:
        """The samples that were left out because the model failed on them, each with the reason."""
        return [each for entry in self.entries for each in entry["set_aside"]]

    def site(self, name: str) -> SitePlan:
        """Return how a site is written."""
        for site in self.plan.sites:
            if site.site in (name, f"{name}:output"):
                return site
        raise HarvestError(
            f"{self.folder} has no site {name!r}: it has {', '.join(self.sites)}.{suggest(name, self.sites)}"
        )

    def statistics(self, site: str) -> SiteStatistics:
        """Return mean, variance, minimum and maximum of every dimension of a site, and its histogram."""
        return self.folder.statistics(self.plan, self.entries)[self.site(site).site]

    def files(self, site: str | None = None) -> list[str]:
        """Return the committed shards, for other readers: pyarrow, Polars, DuckDB, Ray Data, HF datasets."""
        wanted = None if site is None else self.site(site).site
        shards = [shard for entry in self.entries for shard in entry["shards"]]
        return [self.folder.files.path(shard["file"]) for shard in shards if wanted in (None, shard["site"])]

    def shards(self, sites: Sequence[str]) -> list[ShardKey]:
        """Return the shards that all of some sites have, with the same rows."""
        found: dict[tuple[int, int], dict[str, int]] = {}
        for entry in self.entries:
            for shard in entry["shards"]:
                number = int(shard["file"][-10:-8])
                found.setdefault((entry["part"], number), {})[shard["site"]] = shard["rows"]
        keys = []
        for (part, number), rows in sorted(found.items()):
            counts = {rows.get(site, 0) for site in sites}
            if len(counts) > 1:
                raise HarvestError(f"{', '.join(sites)} do not have the same rows: read one site at a time")
            if count := counts.pop():
                keys.append(ShardKey(part, number, count))
        return keys

    def batches(
        self, size: int, *sites: str, seed: int | None = 0, memory: int | str = "256MB", rank: int = 0, world: int = 1,
        drop_last: bool = False,
    ) -> Iterator[RowBatch]:  # fmt: skip
        """Yield batches of rows in random order: a window of random shards at a time is read and mixed.

        Every row comes once. Several sites give aligned rows. `seed=None` reads in the order of the files. Of several
        readers, each with its `rank`, all see different shards.
        """
        if size < 1:
            raise HarvestError(f"the size of a batch must be at least 1, got {size}")
        if not 0 <= rank < world:
            raise HarvestError(f"rank must be between 0 and {world - 1}, got {rank}")
        chosen = [self.site(site) for site in sites] or list(self.plan.sites)[:1]
        if not sites and len(self.plan.sites) > 1:
            raise HarvestError(
                f"name the sites to read, batches({size}, {self.sites[0]!r}): there are {', '.join(self.sites)}"
            )
        return self._batches(size, chosen, seed, number_of_bytes(memory), (rank, world), drop_last)

    def dataset(
        self, size: int, *sites: str, seed: int = 0, memory: int | str = "256MB",
        ranks: tuple[int, int] | None = None,
    ) -> HarvestDataset:  # fmt: skip
        """Return a `torch.utils.data.IterableDataset` of batches; its workers, and ranks, see disjoint parts.

        `ranks` is this process's number and how many there are; by default what torchrun says.
        """
        from tensortap.harvest.torch_dataset import HarvestDataset

        return HarvestDataset(self, size, sites, seed, memory, ranks)

    def to_ray(self, site: str | None = None, *, shuffle: bool = False, seed: int = 0) -> Any:
        """Return a Ray Dataset of the committed shards of a site; with `shuffle` Ray mixes all rows of all shards."""
        ray = start_ray()
        dataset = ray.data.read_parquet(self.files(site or self.sites[0]))
        return dataset.random_shuffle(seed=seed) if shuffle else dataset

    def _batches(
        self, size: int, sites: list[SitePlan], seed: int | None, memory: int, share: tuple[int, int], drop_last: bool
    ) -> Iterator[RowBatch]:
        keys = self.shards([site.site for site in sites])
        random = None if seed is None else np.random.default_rng(seed)
        order = np.arange(len(keys)) if random is None else random.permutation(len(keys))
        mine = [keys[i] for i in order[share[0] :: share[1]]]
        if random is not None:
            random = np.random.default_rng([seed or 0, share[0]])
        per_row = sum(NATIVE[site.dtype].itemsize * site.width + 4 * site.indices for site in sites) + 24
        rest: RowBatch | None = None
        for window in windows(mine, int(memory * _WINDOW), per_row):
            rows = self._read(window, sites, rest)
            order = np.arange(len(rows)) if random is None else random.permutation(len(rows))
            whole = len(order) - len(order) % size
            for start in range(0, whole, size):
                yield rows.take(order[start : start + size])
            rest = rows.take(order[whole:]) if whole < len(order) else None
        if rest is not None and not drop_last:
            yield rest

    def _read(self, window: list[ShardKey], sites: list[SitePlan], before: RowBatch | None) -> RowBatch:
        """Return the rows of several shards, with those that the window before left over."""
        total = sum(key.rows for key in window) + (0 if before is None else len(before))
        rows = empty_batch(total, sites)
        at = 0
        if before is not None:
            at = len(before)
            _copy(rows, slice(0, at), before)
        for key in window:
            for n, site in enumerate(sites):
                table = self._table(f"data/{site.folder}/part-{key.part:06d}-{key.number:02d}.parquet", site)
                _fill(rows, slice(at, at + key.rows), table, site, first=n == 0)
            at += key.rows
        return rows

    def _table(self, name: str, site: SitePlan) -> pa.Table:
        columns = ["sample", "position", "token", VALUES, *([INDICES] if site.indices else [])]
        files = self.folder.files
        try:
            if files.local is not None:
                return pq.read_table(
                    files.local / name, columns=columns, memory_map=True, pre_buffer=False, partitioning=None
                )
            with files.open(name) as file:
                return pq.read_table(pa.py_buffer(file.read()), columns=columns)
        except FileNotFoundError:
            raise HarvestError(f"{files}/{name} is in the manifest and missing: the harvest is damaged") from None
        except pa.ArrowInvalid as error:
            raise HarvestError(f"{files}/{name} is damaged: {error}") from error


def open_harvest(path: str | os.PathLike[str]) -> Harvest:
    """Open a folder that `harvest` wrote; one that is still being written shows what is committed."""
    folder = HarvestFolder(path)
    about = folder.read()
    if about is None:
        raise HarvestError(f"{folder} holds no harvest: there is no {PLAN} in it")
    return Harvest(folder, about)


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
