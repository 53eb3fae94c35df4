"""Call the C kernel inside a compiled step: XLA calls it for a tensor on the host, and the row leaves the step.

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

from tensortap.adapters.jax.extract import ExportedArrays, ExtractedValue
from tensortap.reduce import graph_rows as packed_rows
from tensortap.reduce import kernel as kernels
from tensortap.types import DTYPE_CODE

_NAME: Final = "tensortap_row"
_NONE: Final = np.zeros(0, np.uint32)
WORDS: Final = {"kernel": packed_rows.HEAD, "kernel and histogram": packed_rows.WITH_HISTOGRAM}
"""How many 32-bit words leave the step, by the kind of export."""


@cache
def available() -> bool:
    """Return whether steps on the host can call the kernel; register it the first time."""
    if kernels.xla is None:
        return False
    try:
        jax.ffi.register_ffi_target(_NAME, kernels.xla(), platform="cpu")
    except Exception:  # an XLA that does not take it
        return False
    return True


def row_of(value: Any, histogram: bool, hashed: bool) -> ExportedArrays:
    """Return the words of a tensor's row (in the step)."""
    kind = "kernel and histogram" if histogram else "kernel"
    varying: Any = getattr(jax.typeof(value), "vma", ())  # over devices, within `shard_map`
    result = jax.ShapeDtypeStruct((WORDS[kind],), np.uint32, **({"vma": varying} if varying else {}))
    about = {"dtype": np.int32(DTYPE_CODE[str(value.dtype)]), "hash": np.int32(hashed)}
    return ExportedArrays(kind, (jax.ffi.ffi_call(_NAME, result)(value, **about),))


def packed(values: Sequence[ExtractedValue], arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays of all values at the end of the step, with plain rows joined into one array at the front."""
    alone: list[Any] = []
    others: list[Any] = []
    for value, own in _owned(values, arrays):
        (alone if _is_plain_row(value) else others).extend(own)
    return [jnp.concatenate(alone), *others] if alone else others


def unpacked(
    values: Sequence[ExtractedValue], arrays: Sequence[Any]
) -> Iterator[tuple[ExtractedValue, list[npt.NDArray[Any]]]]:
    """Return each value with its arrays (on the host)."""
    rest = iter(arrays)
    alone = np.asarray(next(rest)) if any(map(_is_plain_row, values)) else _NONE
    at = 0
    for value in values:
        if _is_plain_row(value):
            yield value, [alone[at : at + WORDS[value.kind]]]
            at += WORDS[value.kind]
        else:
            yield value, [np.asarray(next(rest)) for _ in range(value.arrays)]


def _owned(values: Sequence[ExtractedValue], arrays: Sequence[Any]) -> Iterator[tuple[ExtractedValue, Sequence[Any]]]:
    at = 0
    for value in values:
        yield value, arrays[at : at + value.arrays]
        at += value.arrays


def _is_plain_row(value: ExtractedValue) -> bool:
    return value.kind in WORDS and not value.loops and not value.flagged
