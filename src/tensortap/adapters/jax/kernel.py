"""The C kernel inside a compiled step: XLA calls it for a tensor on the host, and what leaves the step is the row.

It runs on whichever of XLA's threads has time, without Python. The words that leave are laid out in `_kernel_xla.h`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt

from tensortap.reduce import kernels
from tensortap.reduce.buckets import BUCKETS
from tensortap.types import DTYPE_CODE

_NAME: Final = "tensortap_row"
_ROW: Final = kernels.ROW.itemsize // 4
_HEAD: Final = _ROW + 2  # and where the histogram begins, and how long it is


@cache
def available() -> bool:
    """Whether steps that run on the host can call the kernel; registers it the first time."""
    if kernels.xla is None:
        return False
    jax.ffi.register_ffi_target(_NAME, kernels.xla(), platform="cpu")
    return True


def row_of(value: Any, histogram: bool) -> Any:
    """In the step: the words of a tensor's row."""
    words = _HEAD + BUCKETS * histogram
    varying: Any = getattr(jax.typeof(value), "vma", ())  # over devices, within `shard_map`
    result = jax.ShapeDtypeStruct((words,), np.uint32, **({"vma": varying} if varying else {}))
    return jax.ffi.ffi_call(_NAME, result)(value, dtype=np.int32(DTYPE_CODE[str(value.dtype)]))


def read(words: npt.NDArray[Any]) -> tuple[Any, int, npt.NDArray[Any] | None]:
    """On the host: a row as tables hold it, the offset and the counts of the histogram (None without one)."""
    row = words[:_ROW].view(kernels.ROW)[0].item()
    if row[0] < 0:
        raise MemoryError("there was no memory to reduce a tensor inside the step")
    offset, length = words[_ROW:_HEAD].view(np.int32).tolist()
    return row, offset, None if length < 0 else words[_HEAD : _HEAD + length]
