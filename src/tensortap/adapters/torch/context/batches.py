"""Batches: a fingerprint of a model's inputs, and the samples that a loader drew for them."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from tensortap.adapters.torch.context.plain import is_plain
from tensortap.adapters.torch.samples.batches import GivenBatch

_MOST_INDICES: Final = 1024
_PROBES: Final = 256  # elements of a tensor that its fingerprint is made of


def fingerprint(value: Any) -> str:
    """Return a hash of the tensors in a value: shape, dtype and evenly spaced elements; empty when there are none."""
    found = list(tensors_in(value))[:4]
    if not found or not all(map(is_plain, found)):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in found:
        flat = tensor.detach().reshape(-1)
        part = flat[:: max(1, flat.numel() // _PROBES)]
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(part.to(torch.float64).numpy().tobytes())
    return digest.hexdigest()


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        if value.numel() and not value.is_sparse and not value.is_quantized and not value.is_complex():
            yield value
    elif depth and isinstance(value, dict):
        for item in list(value.values())[:8]:
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value[:8]:
            yield from tensors_in(item, depth - 1)


class LoaderRecord:
    """One data loader: how often it was iterated, and the samples in the batch that it gave last."""

    def __init__(self, loader: Any, number: int) -> None:
        self.number = number
        self.epochs = 0
        self.given = 0  # batches in this epoch
        self.order = ""  # a hash of the samples in the first batch of this epoch
        self.current: list[int] = []  # the indices of the samples in the last batch
        self._drawn: deque[list[int]] = deque(maxlen=256)  # of batches that are being read
        self._sampler = _reference(loader._index_sampler)  # a loader may be deleted while it is iterated
        self._described = _describe(loader)

    def of(self, loader: Any) -> bool:
        """Return whether it is the record of this loader."""
        return self._sampler() is loader._index_sampler

    def started(self) -> dict[str, Any]:
        """Begin an epoch; return how many batches the one before gave, and a hash of its first samples."""
        before = {"batches_before": self.given, "order_before": self.order}
        self.given, self.order = 0, ""
        self._drawn.clear()
        self.epochs += 1
        return before

    def draw(self, iterator: Any, indices: Any) -> None:
        """Note the indices of a batch, if the iterator is one of this loader."""
        if self._owns(iterator):
            several = hasattr(indices, "__len__") and not isinstance(indices, (str, bytes, dict))
            drawn = indices.tolist() if hasattr(indices, "tolist") else indices
            self._drawn.append(list(drawn)[:_MOST_INDICES] if several else [])
            if not self.order and len(self._drawn[-1]) > 1:
                self.order = hashlib.blake2b(repr(self._drawn[-1]).encode(), digest_size=8).hexdigest()

    def give(self, iterator: Any) -> bool:
        """Note that the batch was given, if the iterator is one of this loader."""
        if not self._owns(iterator):
            return False
        self.given += 1
        self.current = self._drawn.popleft() if self._drawn else []
        return True

    def last_batch(self, batch: Any, dataset: Any) -> GivenBatch:
        """Return the last batch, with the samples in it."""
        return GivenBatch(batch, self.current, dataset, self.number, self.epochs, self.given - 1)

    def _owns(self, iterator: Any) -> bool:
        return self._sampler() is iterator._index_sampler

    def describe(self, loader: Any) -> dict[str, Any]:
        """Return its settings, and the epoch that was set on its sampler, if the sampler shuffles by the epoch."""
        return {"number": self.number, **self._described, **_told_epoch(loader.sampler)}


def _describe(loader: Any) -> dict[str, Any]:
    return {
        "dataset": type(loader.dataset).__name__, "samples": _length(loader.dataset), "batches": _length(loader),
        "batch_size": loader.batch_size, "sampler": type(loader.sampler).__name__, "workers": loader.num_workers,
        "drop_last": loader.drop_last, "worker_init": loader.worker_init_fn is not None,
    }  # fmt: skip


def _told_epoch(sampler: Any) -> dict[str, Any]:
    if not isinstance(sampler, DistributedSampler) or not sampler.shuffle:
        return {}
    return {"sampler_epoch": int(sampler.epoch), "sampler_seed": int(sampler.seed)}


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:  # a list of indices, which has none
        return lambda: value


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None
