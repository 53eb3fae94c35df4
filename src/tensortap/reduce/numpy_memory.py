"""Read the memory of a tensor with NumPy: from address, shape and strides to chunks of float32 or float64 values."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.types import DTYPE_CODE, DTYPES

Array = npt.NDArray[Any]
CHUNK: Final = 1 << 17


def _fp8(mantissa_bits: int, bias: int, nan: tuple[int, ...], inf: int = -1) -> Array:
    code = np.arange(256)
    mantissa, exponent = code & ((1 << mantissa_bits) - 1), (code & 0x7F) >> mantissa_bits
    whole = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    size = np.ldexp(whole.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits)
    size[(code & 0x7F) == inf] = np.inf
    value: Array = np.where(code & 0x80, -size, size).astype(np.float32)
    value[list(nan)] = np.nan
    return value


FP8: Final = {
    DTYPE_CODE["float8_e4m3fn"]: _fp8(3, 7, (0x7F, 0xFF)),
    DTYPE_CODE["float8_e5m2"]: _fp8(2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), inf=0x7C),
    DTYPE_CODE["float8_e4m3fnuz"]: _fp8(3, 8, (0x80,)),
    DTYPE_CODE["float8_e5m2fnuz"]: _fp8(2, 16, (0x80,)),
}
_UNSIGNED: Final = {1: "u1", 2: "u2"}
_RAW: Final = tuple(
    np.dtype(_UNSIGNED[d.itemsize] if d.name.startswith(("bfloat", "float8", "bool")) else d.name) for d in DTYPES
)
_WIDE_RANGE: Final = (DTYPE_CODE["float64"], DTYPE_CODE["complex128"])


def plan(
    address: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> tuple[int, list[tuple[int, int]]]:
    """Return the first address and the (length, stride) runs, largest stride outermost, merged where they can be."""
    itemsize, numel = DTYPES[dtype].itemsize, math.prod(shape)
    if strides is None:
        return address, [(numel, itemsize)]
    runs: list[tuple[int, int]] = []
    for length, stride in zip(shape, strides, strict=True):
        if length != 1:
            address += (length - 1) * stride if stride < 0 else 0
            runs.append((length, abs(stride)))
    merged: list[tuple[int, int]] = []
    for length, stride in sorted(runs, key=lambda run: -run[1]):
        if merged and merged[-1][1] == length * stride:
            length *= merged.pop()[0]
        merged.append((length, stride))
    return address, merged or [(numel, itemsize)]


def _view(address: int, dtype: int, runs: list[tuple[int, int]]) -> Array:
    raw = _RAW[dtype]
    span = sum((length - 1) * stride for length, stride in runs) + raw.itemsize
    memory: Any = (ctypes.c_char * span).from_address(address)
    view: Array = np.ndarray([length for length, _ in runs], raw, memory, 0, [stride for _, stride in runs])
    view.flags.writeable = False
    return view


def logical_bytes(address: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Array:
    """Return the bytes of the elements in C order, whatever the order of storage."""
    raw, size = _RAW[dtype], math.prod(shape)
    if not size:
        return np.zeros(0, np.uint8)
    if strides is None:
        return _view(address, dtype, [(size, raw.itemsize)]).view(np.uint8)
    below = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True) if stride < 0)
    span = sum((length - 1) * abs(stride) for length, stride in zip(shape, strides, strict=True)) + raw.itemsize
    memory: Any = (ctypes.c_char * span).from_address(address + below)
    return np.ndarray(shape, raw, memory, -below, strides).reshape(-1).view(np.uint8)


def _magnitude64(z: Array) -> Array:
    re, im = z.real.astype(np.float64), z.imag.astype(np.float64)
    size: Array = np.sqrt(re * re + im * im)
    size[np.isinf(re) | np.isinf(im)] = np.inf
    return size


def _magnitude128(z: Array) -> Array:
    re, im = np.abs(z.real), np.abs(z.imag)
    most = np.where(re > im, re, im)
    power = np.where(most > 2.0**500, -600, np.where(most < 2.0**-400, 600, 0))
    a, b = np.ldexp(re, power), np.ldexp(im, power)
    size: Array = np.ldexp(np.sqrt(a * a + b * b), -power)
    size[np.isinf(re) | np.isinf(im)] = np.inf
    return size


def _values(raw: Array, dtype: int) -> Array:
    """Return a chunk as float32 where that is exact, else as float64."""
    name = DTYPES[dtype].name
    if name in ("float32", "float64"):
        return raw
    if name == "bfloat16":
        return np.asarray(raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in FP8:
        return np.asarray(FP8[dtype][raw])
    if name == "bool":
        return np.asarray(raw != 0, np.float32)
    if name == "complex64":
        return _magnitude64(raw)
    if name == "complex128":
        return _magnitude128(raw)
    return np.asarray(raw, np.float32 if raw.dtype.itemsize <= 2 else np.float64)


def chunks(address: int, dtype: int, runs: list[tuple[int, int]]) -> Iterator[Array]:
    """Yield the elements, in the order in which they lie in memory."""
    view = _view(address, dtype, runs)
    for begin in range(0, view.size, CHUNK):
        piece = view[begin : begin + CHUNK] if view.ndim == 1 else view.flat[begin : begin + CHUNK]
        yield _values(np.ascontiguousarray(piece), dtype)
