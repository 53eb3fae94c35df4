"""The kernel over any memory: strides, views, alignment; and arguments that make no sense."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from reduce.kernel_checks import COUNTS, _kernel, run, same, ways

from tensortap.reduce import numpy_kernel as fallback
from tensortap.reduce.statistics import ROW


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))))
def test_dense_tensors_in_any_order(axes):
    """A dense tensor has one result whatever the order of its dimensions."""
    array = np.random.default_rng(6).standard_normal((5, 7, 1, 300)).astype(np.float32)
    assert same(run(array.transpose(axes)), run(array.reshape(-1)))


VIEWS = {
    "columns": lambda a: a[:, ::2],
    "rows": lambda a: a[::3],
    "inner slice": lambda a: a[:, 5:90],
    "reversed": lambda a: a[::-1, ::-1],
    "reversed step": lambda a: a[:, ::-3].T,
    "broadcast": lambda a: np.broadcast_to(a[:, :1, None], (len(a), 9, 11)),
    "broadcast outside": lambda a: np.broadcast_to(a[3], (5, *a[3].shape)),
    "broadcast one": lambda a: np.broadcast_to(a[3, 3], (70, 100)),
    "three": lambda a: a.reshape(-1, 4, 25)[::2, 1:3, ::-2].transpose(2, 0, 1),
    "one": lambda a: a[3:4, 7:8],
    "none": lambda a: a[3:3],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "int8", "complex128"])
def test_views_count_every_element_as_often_as_it_appears(view, name):
    """Slices, steps, reversals and broadcasts agree with a copy, and with NumPy in every bit."""
    base = (np.random.default_rng(7).standard_normal((300, 100)) * 20).astype(name)
    array = VIEWS[view](base)
    result = run(array)
    copy = run(np.ascontiguousarray(array))
    assert [result[0][c] for c in (*COUNTS, "min", "max")] == pytest.approx(
        [copy[0][c] for c in (*COUNTS, "min", "max")], nan_ok=True
    )
    assert result[0]["mean"] == pytest.approx(copy[0]["mean"], rel=1e-5, abs=1e-5, nan_ok=True)
    assert result[0]["std"] == pytest.approx(copy[0]["std"], rel=1e-6, nan_ok=True)
    assert result[1] == copy[1] and np.array_equal(result[2], copy[2])
    by_numpy = run(array, fallback)
    for level, threads in ways():
        _kernel.set_level(level)
        _kernel.set_threads(threads)
        assert same(run(array), by_numpy), (level, threads)


def test_large_views_in_threads():
    """A strided tensor over several chunks gives the same bits with and without threads."""
    array = np.random.default_rng(8).standard_normal((1100, 1300)).astype(np.float32)[:, ::-2]
    by_numpy = run(array, fallback)
    for level, threads in ways():
        _kernel.set_level(level)
        _kernel.set_threads(threads)
        assert same(run(array), by_numpy), (level, threads)


def test_misaligned_memory():
    """Elements at odd addresses are read as well."""
    values = np.random.default_rng(9).standard_normal(5000)
    raw = np.zeros(values.nbytes + 1, np.uint8)
    raw[1:] = values.view(np.uint8)
    assert same(run(np.ndarray(5000, np.float64, raw, 1)), run(values))
    assert same(run(np.ndarray(5000, np.float64, raw, 1), fallback), run(values))


@pytest.mark.parametrize("module", [_kernel, fallback])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"dtype": 99}, ValueError, "dtype code 99"),
        ({"dtype": -1}, ValueError, "dtype code -1"),
        ({"shape": (2, -3)}, ValueError, "negative"),
        ({"shape": [4]}, TypeError, "tuple"),
        ({"strides": (4, 4)}, ValueError, "strides has 2"),
        ({"strides": 4}, TypeError, "strides"),
        ({"address": 0}, ValueError, "address is 0"),
        ({"shape": (1,) * 65}, ValueError, "65 dimensions"),
        ({"row": 0}, ValueError, "row_address"),
    ],
)
def test_bad_arguments_are_named(module, change, error, text):
    """A bad argument raises an error that names it."""
    x, row = np.zeros(4, np.float32), np.zeros(11)
    good = {"row": row.ctypes.data, "hist": 0, "address": x.ctypes.data, "dtype": 1, "shape": (4,), "strides": None}
    with pytest.raises(error, match=text):
        module.reduce(*(good | change).values())


def test_nothing_at_no_address():
    """No elements need no memory."""
    row = np.zeros(1, ROW)
    assert _kernel.reduce(row.ctypes.data, 0, 0, 1, (0, 5), (20, 4)) == (0, -1)
    assert row[0]["numel"] == 0 and math.isnan(row[0]["min"])


def test_levels_and_threads_are_checked():
    """Unknown levels and silly numbers of threads raise."""
    with pytest.raises(ValueError, match="LEVELS"):
        _kernel.set_level("mmx")
    with pytest.raises(ValueError, match="threads"):
        _kernel.set_threads(0)


@pytest.mark.thorough  # gigabytes, for one addition of counts that test_merge.py has too
def test_more_elements_than_a_count_can_hold():
    """Above 2^32 - 1 elements there is no histogram."""
    one = np.ones(1, np.int8)
    row, offset, counts = run(np.broadcast_to(one, (3, 4)))
    assert counts is not None
    huge = np.broadcast_to(one, (1 << 16, 1 << 16))
    row, offset, counts = run(huge)
    assert (row["numel"], row["mean"], offset, counts) == (1 << 32, 1.0, 0, None)
