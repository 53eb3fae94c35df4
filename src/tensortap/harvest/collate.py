"""Put samples together as a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensortap.errors import HarvestError
from tensortap.harvest.batch import TensorLike, array_or_object, as_array
from tensortap.harvest.rows import Array


def collated(samples: list[Any]) -> Any:
    """Put samples together as a batch: arrays are stacked, texts left out, sequences of other lengths padded.

    >>> collated([{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, {"input_ids": [8], "attention_mask": [1]}])
    {'input_ids': array([[5, 6, 7],
           [8, 0, 0]]), 'attention_mask': array([[1, 1, 1],
           [1, 0, 0]])}
    """
    first = samples[0]
    if isinstance(first, Mapping):
        usable = [key for key in first if _numbers(first[key])]
        masked = any("mask" in str(key) for key in usable)
        for key in usable:
            if any(key not in sample for sample in samples):
                raise HarvestError(
                    f"samples must have the same entries, but one has no {str(key)!r}, which the first of its batch "
                    "has: give collate=, a function from a list of samples to a batch"
                )
        return {key: _stacked([sample[key] for sample in samples], str(key), masked) for key in usable}
    if isinstance(first, tuple):
        return tuple(_stacked([sample[i] for sample in samples], f"[{i}]", False) for i in range(len(first)))
    return _stacked(samples, "the sample", False)


def _numbers(value: Any) -> bool:
    return isinstance(value, TensorLike) or array_or_object(value).dtype.kind in "biuf"


def _stacked(values: list[Any], name: str, masked: bool) -> Any:
    if not all(map(_numbers, values)):
        raise HarvestError(
            f"every sample must have numbers in {name!r}, as the first of its batch has: give collate=, a function "
            "from a list of samples to a batch"
        )
    arrays = [as_array(value) for value in values]
    lengths = {array.shape for array in arrays}
    if len(lengths) == 1:
        return np.stack(arrays)
    if not masked or any(not array.ndim for array in arrays) or len({array.shape[1:] for array in arrays}) > 1:
        raise HarvestError(
            f"samples must have one shape, or a mask to be padded with, but {name!r} has {sorted(lengths)[:3]}: give "
            "collate=, a function from a list of samples to a batch"
        )
    longest = max(len(array) for array in arrays)
    return np.stack([_padded(array, longest) for array in arrays])


def _padded(array: Array, length: int) -> Array:
    """Return a sequence with zeros behind it."""
    return np.pad(array, [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)])
