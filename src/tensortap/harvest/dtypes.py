"""The element types that rows are written in, by the names people give them."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from tensortap.errors import HarvestError
from tensortap.harvest.rows import Array
from tensortap.reduce.columns import round_to_bfloat16

NATIVE: Final[dict[str, np.dtype[Any]]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int16": np.dtype(np.int16),
    "uint16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}
_SHORT: Final = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32", "f64": "float64", "fp8": "float8_e4m3fn",
}  # fmt: skip


def dtype_name(wanted: Any) -> str:
    """Return the full name of a type.

    >>> dtype_name("bf16"), dtype_name(np.float16)
    ('bfloat16', 'float16')
    """
    try:
        name = str(wanted) if isinstance(wanted, str) or "torch" in str(wanted) else str(np.dtype(wanted))
    except TypeError:
        name = ""
    name = name.removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in NATIVE:
        raise HarvestError(f'dtype must be one of {", ".join(NATIVE)}, got {wanted!r}: write dtype="bf16"')
    return name


def cast(values: Array, name: str) -> Array:
    """Return a copy of the values in a type, in one run of memory; what is beyond its range becomes infinite."""
    if name == "bfloat16" and values.dtype == np.float32:
        return round_to_bfloat16(values)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(values, dtype=NATIVE[name], order="C", copy=True)
