"""Return any array or tensor as memory that the kernel can read: without a copy if possible, and without importing a
framework.

A framework's tensor is recognised by the module of its type and asked through its own methods, so nothing is
imported that the user has not imported already.
"""

from __future__ import annotations

import math
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensortap.errors import UnsupportedError
from tensortap.reduce import kernel as kernels
from tensortap.reduce.torch_values import dtype_name, strided_values
from tensortap.types import DTYPE_CODE, DTYPES, Buffer

NUMPY_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(getattr(ml_dtypes, d.name)) if hasattr(ml_dtypes, d.name) else np.dtype(d.name) for d in DTYPES
)
_CODE_OF = {dtype: code for code, dtype in enumerate(NUMPY_DTYPES)}

NO_VALUES: Final = "a meta tensor has a shape but no values; {} once it is on a device"


def buffer_of(value: Any) -> Buffer:
    """Return the memory of any array-like value.

    >>> buffer_of(np.zeros((2, 3), np.float32)).shape
    (2, 3)
    """
    if isinstance(value, np.ndarray):
        return _of_numpy(value)
    if hasattr(value, "data_ptr") and hasattr(value, "detach"):
        return _of_torch(value)
    return _of_numpy(_asarray(value))


def array_of(buffer: Buffer) -> npt.NDArray[Any]:
    """Return a read-only NumPy view of the buffer. It is valid as long as the buffer's owner is."""
    dtype = NUMPY_DTYPES[buffer.dtype]
    strides = buffer.strides or _contiguous(buffer.shape, dtype.itemsize)
    if not all(buffer.shape):
        return np.empty(buffer.shape, dtype)
    array = np.asarray(_Memory(buffer, strides, dtype.itemsize)).view(dtype)
    array.flags.writeable = False
    return array


def view_of(buffer: Buffer) -> npt.NDArray[Any]:
    """Return such a view faster; the caller must be done with it before the buffer's owner can be freed."""
    if buffer.strides is not None or kernels.memory is None or not buffer.address:
        return array_of(buffer)
    dtype = NUMPY_DTYPES[buffer.dtype]
    return np.ndarray(buffer.shape, dtype, kernels.memory(buffer.address, math.prod(buffer.shape) * dtype.itemsize))


def nbytes(buffer: Buffer) -> int:
    """Return how many bytes a copy of the buffer takes."""
    return int(np.prod(buffer.shape, dtype=np.int64)) * DTYPES[buffer.dtype].itemsize


class _Memory:
    """Carry an address through NumPy's array interface, as plain integers of the right width."""

    def __init__(self, buffer: Buffer, strides: tuple[int, ...], itemsize: int) -> None:
        self.owner = buffer.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (buffer.address, True),
            "shape": buffer.shape,
            "strides": strides,
            "typestr": f"<u{itemsize}" if itemsize <= 8 else f"<c{itemsize}",
        }


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def _asarray(value: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise UnsupportedError(
            f"cannot read a {type(value).__name__} as an array ({error}); give an array, a tensor or a number"
        ) from error
    return array


def _of_numpy(array: npt.NDArray[Any]) -> Buffer:
    code = _CODE_OF.get(array.dtype)
    if code is None:
        array = _convert(array)
        code = _CODE_OF[array.dtype]
    strides = None if array.flags.c_contiguous else array.strides
    address = kernels.address(array) or array.__array_interface__["data"][0]
    return Buffer(address, code, array.shape, strides, array)


def _convert(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an equal array of a type the kernel reads, for byte-swapped, long double and ml_dtypes' small floats."""
    native = array.dtype.newbyteorder("=")
    if native in _CODE_OF:
        return array.astype(native)
    if array.dtype.kind == "f":
        return array.astype(np.float64)
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    try:
        if array.dtype.kind not in "OSUTMm" and not array.dtype.names:
            return array.astype(np.float32)
    except (TypeError, ValueError):
        pass
    raise UnsupportedError(
        f"cannot summarise an array of dtype {array.dtype}; give numbers: one of {', '.join(d.name for d in DTYPES)}"
    )


def _of_torch(tensor: Any) -> Buffer:
    if tensor.device.type == "meta":
        raise UnsupportedError(NO_VALUES.format("summarise it"))
    try:
        tensor = strided_values(tensor.detach())
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"cannot summarise a tensor of dtype {tensor.dtype} ({error}); convert it: x.float(), or to one of "
            + ", ".join(d.name for d in DTYPES)
        ) from error
    return buffer_of_plain(tensor if tensor.device.type == "cpu" else tensor.cpu())


def buffer_of_plain(tensor: Any) -> Buffer:
    """Return the memory of a strided tensor on the host, of a type that the kernels read."""
    strides = None if tensor.is_contiguous() else tuple(s * tensor.element_size() for s in tensor.stride())
    return Buffer(tensor.data_ptr(), DTYPE_CODE[dtype_name(tensor)], tuple(tensor.shape), strides, tensor)
