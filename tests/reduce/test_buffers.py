"""Any array becomes memory to read, without a copy where there need be none, and without importing a framework."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tensortap.errors import UnsupportedError
from tensortap.reduce.buffers import NUMPY_DTYPES, array_of, buffer_of, nbytes
from tensortap.types import DTYPES

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_numpy_memory_is_not_copied(dtype: np.dtype[Any]) -> None:
    """An array of a known type is read where it lies, and a view of it holds the same bits."""
    array = np.arange(6).astype(dtype).reshape(2, 3)
    buffer = buffer_of(array)
    assert buffer.address == array.ctypes.data and buffer.strides is None and buffer.shape == (2, 3)
    assert DTYPES[buffer.dtype].name == dtype.name and nbytes(buffer) == array.nbytes
    assert array_of(buffer).dtype == dtype and bits(array_of(buffer)) == bits(array)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::2],
        lambda a: a[::-1],
        lambda a: a.T,
        lambda a: a[:, 1],
        lambda a: np.broadcast_to(a[0], (5, 4)),
        lambda a: np.asfortranarray(a),
    ],
    ids=["every second", "reversed", "transposed", "column", "broadcast", "fortran"],
)
def test_any_strides_are_read_where_they_lie(view: Any) -> None:
    """A view is given with its strides and reads back in its own order."""
    array = view(np.arange(24, dtype=np.float32).reshape(6, 4))
    buffer = buffer_of(array)
    assert buffer.address == array.__array_interface__["data"][0]
    assert np.array_equal(array_of(buffer), array)


def test_a_view_of_a_buffer_cannot_be_written_through() -> None:
    """What reducers are given is read-only."""
    view = array_of(buffer_of(np.zeros(3)))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_view_keeps_its_owner_alive() -> None:
    """The memory under a view stays as long as the view."""
    view = array_of(buffer_of(np.full(1000, 7.0)))
    np.full(1000, 8.0)
    assert view.sum() == 7000


@pytest.mark.parametrize("value", [3, 2.5, True, [1, 2], [[1.0], [2.0]], (1, 2), np.float32(3), range(4)], ids=repr)
def test_numbers_and_lists_are_arrays_too(value: Any) -> None:
    """Python numbers, lists and NumPy scalars are read as NumPy reads them."""
    assert np.array_equal(array_of(buffer_of(value)), np.asarray(value))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_no_elements_and_no_dimensions(shape: tuple[int, ...]) -> None:
    """Zero-size and zero-dimensional arrays keep their shape."""
    for value in (np.ones(shape, np.float32), torch.ones(shape)):
        assert buffer_of(value).shape == shape
        assert array_of(buffer_of(value)).shape == shape


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">u2", ">c16"])
def test_swapped_bytes_are_put_right(dtype: str) -> None:
    """Arrays of the other byte order are read by value."""
    array = np.array([1, 2, 300]).astype(dtype)
    assert np.array_equal(array_of(buffer_of(array)), array)


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float8_e3m4", "float8_e8m0fnu", "float8_e4m3b11fnuz"]
)
def test_small_floats_without_a_path_of_their_own_are_widened(dtype: str) -> None:
    """ml_dtypes' other types are read exactly, as float32."""
    array = np.array([1, 2, 4]).astype(getattr(ml_dtypes, dtype))
    assert DTYPES[buffer_of(array).dtype].name == "float32"
    assert array_of(buffer_of(array)).tolist() == [1, 2, 4]


def test_long_doubles_are_read_as_doubles() -> None:
    """A long double loses the digits that a double has not."""
    assert array_of(buffer_of(np.array([0.5, 3], np.longdouble))).tolist() == [0.5, 3]


@pytest.mark.parametrize(
    "value",
    ["text", [object()], {"a": 1}, None, np.array(["x"]), np.array([None]), np.zeros(2, "M8[s]"), np.zeros(2, "i4,f4")],
    ids=["text", "object", "mapping", "none", "strings", "objects", "dates", "fields"],
)
def test_what_holds_no_numbers_is_named(value: Any) -> None:
    """A value that cannot be read is an error that says what can."""
    with pytest.raises(UnsupportedError, match="cannot"):
        buffer_of(value)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128], ids=str)
def test_torch_memory_is_not_copied(dtype: torch.dtype) -> None:
    """A dense CPU tensor is read where it lies, whatever its type."""
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    buffer = buffer_of(tensor)
    assert buffer.address == tensor.data_ptr()
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert bits(array_of(buffer)) == raw


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_torch_tensors_that_are_not_plain() -> None:
    """Lazily conjugated, negated and expanded tensors are read by value, sparse and nested ones by what they store."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    for tensor, expected in [
        (z.conj(), z.numpy().conj()),
        (z.conj().imag, -z.imag.numpy()),
        (torch.tensor([[1.0], [2.0]]).expand(2, 3), np.array([[1.0] * 3, [2.0] * 3])),
        (dense.to_sparse(), np.array([2.0])),
        (dense.to_sparse_csr(), np.array([2.0])),
        (torch.nested.nested_tensor([torch.ones(2), torch.zeros(1)]), np.array([1.0, 1.0, 0.0])),
        (torch.nested.nested_tensor([torch.ones(2), torch.zeros(1)], layout=torch.jagged), np.array([1.0, 1.0, 0.0])),
        (torch.ones(3, requires_grad=True) * 2, np.full(3, 2.0)),
        (torch.nn.Parameter(torch.ones(2)), np.ones(2)),
    ]:
        assert np.array_equal(array_of(buffer_of(tensor)), expected)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_read_by_value() -> None:
    """A quantised tensor gives the numbers that it stands for."""
    tensor = torch.quantize_per_tensor(torch.tensor([0.0, 1.0, 2.0]), 0.5, 1, torch.quint8)
    assert array_of(buffer_of(tensor)).tolist() == [0.0, 1.0, 2.0]


def test_half_complex_is_widened() -> None:
    """torch.complex32 is read as complex64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of ComplexHalf once in a process
        tensor = torch.zeros(2, dtype=torch.complex32)
    assert DTYPES[buffer_of(tensor).dtype].name == "complex64"


def test_reading_a_tensor_leaves_it_alone() -> None:
    """No gradient is recorded and nothing is written."""
    tensor = torch.ones(3, requires_grad=True)
    before = tensor._version
    buffer_of(tensor)
    assert tensor.grad_fn is None and tensor._version == before and tensor.requires_grad


def test_a_meta_tensor_is_named() -> None:
    """A tensor without values is a clear error."""
    with pytest.raises(UnsupportedError, match="meta tensor"):
        buffer_of(torch.empty(3, device="meta"))


def test_a_torch_type_without_a_path_is_named() -> None:
    """A tensor type that cannot be read is an error that shows what to write."""
    with pytest.raises(UnsupportedError, match=r"x\.float\(\)"):
        buffer_of(torch.empty(2, dtype=torch.bits8))


def test_a_small_torch_float_without_a_path_of_its_own_is_widened() -> None:
    """It is read exactly, as float32, as its NumPy twin is."""
    tensor = torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e8m0fnu)
    assert array_of(buffer_of(tensor)).tolist() == [1.0, 2.0, 4.0]


def test_no_framework_is_imported() -> None:
    """Reading NumPy arrays imports neither torch nor pandas."""
    code = """
import sys, numpy as np
from tensortap.reduce.summary import summarize
summarize(np.ones(3)); summarize([1, 2])
assert not {"torch", "pandas", "tensorflow", "jax", "polars"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
