"""The C kernel inside a compiled step: XLA calls it for a tensor on the host, and what leaves the step is the row.

It runs on whichever of XLA's threads has time, without Python.
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
from tensortap.reduce import kernel as kernels
from tensortap.reduce import packed as words
from tensortap.types import DTYPE_CODE

_NAME: Final = "tensortap_row"
_NONE: Final = np.zeros(0, np.uint32)
WORDS: Final = {"kernel": words.HEAD, "kernel and histogram": words.WITH_HISTOGRAM}
"""How many words leave the step, by the kind of export."""


@cache
def available() -> bool:
    """Whether steps that run on the host can call the kernel; registers it the first time."""
    if kernels.xla is None:
        return False
    try:
        jax.ffi.register_ffi_target(_NAME, kernels.xla(), platform="cpu")
    except Exception:  # an XLA that does not take it
        return False
    return True


def row_of(value: Any, histogram: bool) -> Export:
    """In the step: the words of a tensor's row."""
    kind = "kernel and histogram" if histogram else "kernel"
    varying: Any = getattr(jax.typeof(value), "vma", ())  # over devices, within `shard_map`
    result = jax.ShapeDtypeStruct((WORDS[kind],), np.uint32, **({"vma": varying} if varying else {}))
    return Export(kind, (jax.ffi.ffi_call(_NAME, result)(value, dtype=np.int32(DTYPE_CODE[str(value.dtype)])),))


def packed(items: Sequence[Item], arrays: Sequence[Any]) -> list[Any]:
    """In the step, at its end: the arrays of all items, with rows by themselves as one array at the front."""
    alone: list[Any] = []
    others: list[Any] = []
    for item, own in _owned(items, arrays):
        (alone if _by_itself(item) else others).extend(own)
    return [jnp.concatenate(alone), *others] if alone else others


def unpacked(items: Sequence[Item], arrays: Sequence[Any]) -> Iterator[tuple[Item, list[npt.NDArray[Any]]]]:
    """On the host: each item with its arrays."""
    rest = iter(arrays)
    alone = np.asarray(next(rest)) if any(map(_by_itself, items)) else _NONE
    at = 0
    for item in items:
        if _by_itself(item):
            yield item, [alone[at : at + WORDS[item.kind]]]
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
