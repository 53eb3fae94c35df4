"""The batches that loaders gave last, and which of their samples a row is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tensortap.adapters.torch.modules.nested import tensors_in_containers

_KEPT: Final = 4  # batches; loaders that read ahead give the next one before this one is used
_MOST_BYTES: Final = 1 << 27  # of a batch that is kept after the next one has come
_KEYS: Final = ("samples", "imgs", "image_files", "files", "paths", "filenames", "file_names", "keys", "ids", "names")


class GivenBatch(NamedTuple):
    """One batch of a loader, with the indices of its samples."""

    batch: Any
    indices: Sequence[Any]
    dataset: Any
    loader: int
    epoch: int
    number: int  # in its epoch

    def tensors(self) -> list[Tensor]:
        """Return the tensors in it."""
        return [tensor for _, tensor in tensors_in_containers(self.batch)]


class RecentBatches:
    """The last batches that were given."""

    def __init__(self) -> None:
        self._given: deque[GivenBatch] = deque(maxlen=_KEPT)

    def add(self, given: GivenBatch) -> None:
        """Keep a batch, and drop the one before if it is large. Called for every batch: it must cost nothing."""
        if self._given and _is_large(self._given[-1].batch):
            self._given.pop()
        self._given.append(given)

    def of(self, used: Iterable[Tensor]) -> GivenBatch | None:
        """Return the batch that these tensors were taken from: the same memory, or the same values."""
        tensors = [t for t in used if t.dim()]
        for same in (_same_memory, _same_values):
            for given in reversed(self._given):
                if any(same(a, b) for a in tensors for b in given.tensors()):
                    found: GivenBatch = given
                    return found
        return None

    def before(self, given: GivenBatch | None) -> GivenBatch | None:
        """Return the batch before another one; without an argument, the last but one."""
        known = list(self._given)
        at = next((i for i, each in enumerate(known) if each is given), len(known) - 1)
        earlier: GivenBatch | None = known[at - 1] if at > 0 else None
        return earlier


def _is_large(batch: Any) -> bool:
    """Return whether the first tensor of a batch is too large to be kept after its step."""
    if isinstance(batch, dict):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, (list, tuple)) and batch:
        batch = batch[0]
    return isinstance(batch, Tensor) and batch.numel() * batch.element_size() > _MOST_BYTES


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.numel() > 0 and a.data_ptr() == b.data_ptr() and a.shape == b.shape


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether the elements are equal, whatever was done to shape, type and device."""
    if a.numel() != b.numel() or not a.numel() or a.is_complex() or b.is_complex():
        return False
    flat_a, flat_b = a.detach().reshape(-1).cpu().double(), b.detach().reshape(-1).cpu().double()
    return bool(torch.equal(flat_a.nan_to_num(), flat_b.nan_to_num()))


def describe_sample(given: GivenBatch, row: int) -> dict[str, Any]:
    """Return where a row of a batch comes from: index and data set, and the file or key where there is one."""
    index = given.indices[row] if row < len(given.indices) else None
    found: dict[str, Any] = {"dataset": type(given.dataset).__name__, "loader": given.loader, "epoch": given.epoch}
    if index is None:  # a data set that is only iterated
        return found | {"batch": given.number}
    found["index"] = plain_index(index)
    if key := _key(given.dataset, index):
        found["key"] = key
    return found


def plain_index(index: Any) -> int | str:
    """Return what a sampler drew as a number or a text.

    >>> plain_index(3), plain_index(("train", 3))
    (3, "('train', 3)")
    """
    return int(index) if hasattr(index, "__index__") else str(index)


def _key(dataset: Any, index: Any, depth: int = 4) -> str:
    """Return the file or key of a sample, where a data set lists them; subsets and joined sets are looked through."""
    if isinstance(index, str):
        return index
    try:
        if depth and hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
            return _key(dataset.dataset, dataset.indices[index], depth - 1)
        if depth and hasattr(dataset, "datasets") and hasattr(dataset, "cumulative_sizes"):
            before = 0
            for inner, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
                if index < end:
                    return _key(inner, index - before, depth - 1)
                before = end
        for name in _KEYS:
            listed = vars(dataset).get(name)
            if isinstance(listed, (list, tuple)) and len(listed) == len(dataset):
                return _text_in(listed[index])
    except Exception:  # a user's data set may raise anything
        return ""
    return ""


def _text_in(entry: Any) -> str:
    parts = entry if isinstance(entry, (list, tuple)) else [entry]
    return next((str(part) for part in parts if isinstance(part, str) or hasattr(part, "__fspath__")), "")
