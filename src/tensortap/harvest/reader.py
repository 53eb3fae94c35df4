"""Read a harvest: shuffled batches within a bounded memory, statistics, and the files for everybody else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tensortap import text
from tensortap.errors import HarvestError, suggest
from tensortap.harvest.folder import PLAN, Entry, HarvestFolder
from tensortap.harvest.plan import HarvestPlan, SitePlan, checked_seed, number_of_bytes
from tensortap.harvest.ray_start import start_ray
from tensortap.harvest.shard_file import ShardFile
from tensortap.harvest.shards import shard_number
from tensortap.harvest.statistics import SiteStatistics
from tensortap.harvest.window import RowBatch, ShardKey, ShardReader
from tensortap.store.names import RUN_JSON

if TYPE_CHECKING:
    from tensortap.harvest.torch_dataset import HarvestDataset


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
        return bool(self.about.get("complete"))

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
        inside = [site for site in self.plan.sites if site.site.startswith((f"{name}:output[", f"{name}:output."))]
        if len(inside) == 1:  # all that is kept of what the module returns, such as the first of a tuple
            return inside[0]
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
                number = shard_number(shard["file"])
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

        Every row comes once. Several sites give aligned rows. `seed=None` reads in the order of the files. Several
        readers, each with its `rank`, see different shards.
        """
        if not isinstance(size, int) or size < 1:
            raise HarvestError(f"the size of a batch must be at least 1, got {size!r}: write batches(4096)")
        if seed is not None:
            checked_seed(seed)
        if world < 1:
            raise HarvestError(f"world must be at least 1, got {world!r}: write batches({size}, rank=0, world=1)")
        if not 0 <= rank < world:
            raise HarvestError(f"rank must be between 0 and {world - 1}, got {rank}")
        chosen = [self.site(site) for site in sites] or list(self.plan.sites)[:1]
        if not sites and len(self.plan.sites) > 1:
            raise HarvestError(
                f"name the sites to read, batches({size}, {self.sites[0]!r}): there are {', '.join(self.sites)}"
            )
        reader = ShardReader(self.folder.files, chosen)
        keys = self.shards([site.site for site in chosen])
        return reader.batches(keys, size, seed, number_of_bytes(memory), (rank, world), drop_last)

    def dataset(
        self, size: int, *sites: str, seed: int = 0, memory: int | str = "256MB",
        ranks: tuple[int, int] | None = None,
    ) -> HarvestDataset:  # fmt: skip
        """Return a `torch.utils.data.IterableDataset` of batches; its workers, and ranks, see disjoint parts.

        `ranks` is this process's number and how many there are; by default what torchrun says.
        """
        from tensortap.harvest.torch_dataset import HarvestDataset

        self.batches(
            size, *sites, seed=checked_seed(seed), memory=memory
        )  # what is wrong is said here, not in a worker
        return HarvestDataset(self, size, sites, seed, memory, ranks)

    def to_ray(self, site: str | None = None, *, shuffle: bool = False, seed: int = 0) -> Any:
        """Return a Ray Dataset of the committed shards of a site; with `shuffle` Ray mixes all rows of all shards."""
        if site is None and len(self.sites) > 1:
            raise HarvestError(f"name the site to read, to_ray({self.sites[0]!r}): there are {', '.join(self.sites)}")
        files = self.files(site or self.sites[0])
        dataset = start_ray().data.read_parquet(files)
        return dataset.random_shuffle(seed=seed) if shuffle else dataset

    def column(self, path: str, name: str) -> pa.ChunkedArray:
        """Return one column of one of the `files`."""
        return ShardFile(self.folder.files, path).columns([name])[name]


def open_harvest(path: str | os.PathLike[str]) -> Harvest:
    """Open a folder that `harvest` wrote; one that is still being written shows what is committed."""
    folder = HarvestFolder(path)
    about = folder.read()
    if about is None:
        run = ", but a run: runs are compared by --reference" if folder.files.exists(RUN_JSON) else ""
        raise HarvestError(f"{folder} holds no harvest: there is no {PLAN} in it{run}")
    return Harvest(folder, about)
