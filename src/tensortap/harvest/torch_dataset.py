"""A harvest as a `torch.utils.data.IterableDataset`: every worker of every rank reads shards of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tensortap.distributed.ranks import of_environment
from tensortap.harvest.reader import Harvest
from tensortap.harvest.rows import Array

_BITS: Final = {  # types that NumPy has not by itself: passed on by their bits
    np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
    np.dtype(ml_dtypes.float8_e4m3fn): torch.float8_e4m3fn,
    np.dtype(ml_dtypes.float8_e5m2): torch.float8_e5m2,
}


class HarvestDataset(IterableDataset[Any]):
    """Yield batches of rows as tensors; give it to `DataLoader(dataset, batch_size=None, num_workers=2)`.

    Each pass is shuffled anew: pass number n has the seed `seed + n`. Workers that are started anew for each pass do
    not know its number: call `set_epoch(n)` before it, or write `persistent_workers=True`.
    """

    def __init__(
        self, harvest: Harvest, size: int, sites: tuple[str, ...], seed: int, memory: int | str,
        ranks: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        self._harvest = harvest
        self._size = size
        self._sites = sites
        self._seed = seed
        self._memory = memory
        self._ranks = ranks
        self._passes = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which pass comes next, where workers are started anew for each."""
        self._passes = epoch

    def __iter__(self) -> Iterator[Any]:
        rank, world = self._ranks or of_environment()[:2]
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        seed = self._seed + self._passes
        self._passes += 1
        for batch in self._harvest.batches(
            self._size, *self._sites, seed=seed, memory=self._memory,
            rank=rank * workers + number, world=world * workers,
        ):  # fmt: skip
            tensors = {site: as_tensor(array) for site, array in batch.arrays.items()}
            yield next(iter(tensors.values())) if len(tensors) == 1 else tensors


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor that shares its memory."""
    bits = _BITS.get(array.dtype)
    return torch.from_numpy(array) if bits is None else torch.from_numpy(array.view(f"u{array.itemsize}")).view(bits)
