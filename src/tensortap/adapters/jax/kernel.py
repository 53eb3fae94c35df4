"""The C kernel inside a compiled step: XLA calls it for a tensor on the host, and what leaves the step is the row.

It runs on whichever of XLA's threads has time, without Python. The words that leave are laid out in `_kernel_xla.h`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from tensortap.adapters.jax.harvest import Export, Item
from tensortap.reduce import kernels
from tensortap.reduce.buckets import BUCKETS
from tensortap.types import DTYPE_CODE

_NAME: Final = "tensortap_row"
_ROW: Final = kernels.ROW.itemsize // 4
_HEAD: Final = _ROW + 2  # and where the histogram begins, and how long it is
_NONE: Final = np.zeros(0, np.uint32)
WORDS: Final = {"kernel": _HEAD, "kernel and histogram": _HEAD + BUCKETS}
"""How many words leave the step, by the kind of export."""


@cache
def available() -> bool:
    """Whether steps that run on the host can call the kernel; registers it the first time."""
    if kernels.xla is None:
        return False
    jax.ffi.register_ffi_target(_NAME, kernels.xla(), platform="cpu")
    return True


def row_of(value: Any, histogram: bool) -> Export:
    """In the step: the words of a tensor's row."""
    kind = "kernel and histogram" if histogram else "kernel"
    varying: Any = getattr(jax.typeof(value), "vma", ())  # over devices, within `shard_map`
    result = jax.ShapeDtypeStruct((WORDS[kind],), np.uint32, **({"vma": varying} if varying else {}))
    return Export(kind, (jax.ffi.ffi_call(_NAME, result)(value, dtype=np.int32(DTYPE_CODE[str(value.dtype)])),))


def packed(items: Sequence[Item], arrays: Sequence[Any]) -> list[Any]:
    """In the step, at its end: the arrays of all items, with rows by themselves as one array at the front."""
    alone, others = [], []
    for item, own in _owned(items, arrays):
        (alone if _by_itself(item) else others).extend(own)
    return [jnp.concatenate(alone), *others] if alone else others


def unpacked(items: Sequence[Item], arrays: Sequence[Any]) -> Iterator[tuple[Item, list[npt.NDArray[Any]]]]:
    """On the host: each item with its arrays."""
    rest = iter(arrays)
    words = np.asarray(next(rest)) if any(map(_by_itself, items)) else _NONE
    at = 0
    for item in items:
        if _by_itself(item):
            yield item, [words[at : at + WORDS[item.kind]]]
            at += WORDS[item.kind]
        else:
            yield item, [np.asarray(next(rest)) for _ in range(item.arrays)]


def _owned(items: Sequence[Item], arrays: Sequence[Any]) -> Iterator[tuple[Item, Sequence[Any]]]:
    at = 0
    for item in items:
        yield item, arrays[at : at + item.arrays]
        at += item.arrays


def _by_itself(item: Item) -> bool:
    return item.kind in WORDS and not item.loops and not item.flagged


def read(words: npt.NDArray[Any]) -> tuple[Any, int, npt.NDArray[Any] | None]:
    """On the host: a row as tables hold it, the offset and the counts of the histogram (None without one)."""
    row = words[:_ROW].view(kernels.ROW)[0]
    if row["numel"] < 0:
        raise MemoryError("there was no memory to reduce a tensor inside the step")
    offset, length = words[_ROW:_HEAD].view(np.int32).tolist()
    return row, offset, None if length < 0 else words[_HEAD : _HEAD + length]
