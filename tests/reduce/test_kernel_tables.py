"""The kernel's rows in the tables of steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from reduce.kernel_checks import _kernel, run

from tensortap.reduce import kernel as kernels
from tensortap.reduce import numpy_kernel as fallback
from tensortap.reduce.statistics import EMPTY_ROW, ROW, STATISTICS
from tensortap.types import DTYPE_CODE


def make_table(rows=4, hist=9000, dims=16, keys=3) -> SimpleNamespace:
    lengths = dict.fromkeys(("recomputed", "finite", "hist_valid"), (rows + 7) // 8)
    lengths |= {"hist_ends": rows + 1, "dims_ends": rows + 1, "hist_counts": hist, "dims": dims, "calls": 2 * keys}
    table = SimpleNamespace(**{n: np.zeros(lengths.get(n, rows), t) for n, t in kernels.COLUMNS})
    table.header = np.zeros(kernels.HEADER_LENGTH, np.int64)
    table.header[:9] = 0, rows, 0, hist, 0, dims, 0, 1234, keys
    return table


def put(module, table, array, key=0, probes=1, want=1, recomputed=0):
    first = table if module is fallback else table.header.ctypes.data
    kernels.bind(table)
    return module.record(
        first,
        key,
        probes,
        want,
        recomputed,
        DTYPE_CODE[str(array.dtype)],
        array.ctypes.data,
        array.shape,
        array.strides,
    )


@pytest.mark.parametrize("module", [_kernel, fallback])
def test_record_fills_a_table(module):
    """Rows land in the columns, histograms and shapes in their arenas, and calls are numbered by key."""
    table = make_table()
    a = np.array([[1.0, -2.0], [0.0, np.nan]], np.float32)
    b = np.array(5.0)
    assert put(module, table, a, key=2, probes=2**63 + 5) == 0
    assert put(module, table, b, key=2, want=0, recomputed=1) == 1
    assert put(module, table, np.full(3, np.nan, np.float16), key=2) == 2
    assert table.header[:9].tolist() == [3, 4, table.hist_ends[1], 9000, 3, 16, 2, 1234, 3]
    assert table.key.tolist() == [2, 2, 2, 0] and table.call.tolist() == [0, 0, 1, 0]
    assert table.seq.tolist() == [0, 1, 2, 0] and table.dtype.tolist()[:3] == [1, 0, 2]
    assert table.probes.tolist()[:2] == [2**63 + 5, 1] and table.time.tolist()[:3] == [1234] * 3
    assert (table.recomputed[0], table.finite[0], table.hist_valid[0]) == (0b10, 0b011, 0b101)
    row, offset, counts = run(a)
    assert [getattr(table, name)[0] for name in ROW.names] == list(row.item())
    assert table.hist_offset[0] == offset
    assert np.array_equal(table.hist_counts[: table.hist_ends[1]], counts)
    assert table.hist_ends[:4].tolist() == [0] + [len(counts)] * 3
    assert table.dims[:3].tolist() == [2, 2, 3] and table.dims_ends[:4].tolist() == [0, 2, 2, 3]
    assert table.calls.tolist() == [0, 0, 0, 0, 2, 1]


@pytest.mark.parametrize("module", [_kernel, fallback])
@pytest.mark.parametrize("full", [{"rows": 0}, {"hist": 1}, {"dims": 1}, {"keys": 1}])
def test_a_full_table_says_so_and_stays_as_it_was(module, full):
    """Where a row would not fit, nothing is written and -1 is returned; after growing it fits."""
    array = np.array([[1.0, 2.0]], np.float32)
    table = make_table(**full)
    before = table.header[:9].tolist()
    assert put(module, table, array, key=1) == -1
    assert table.header[:9].tolist() == before and not table.calls.any()
    assert put(module, make_table(), array, key=1) == 0


@pytest.mark.parametrize("module", [_kernel, fallback])
def test_bits_are_cleared_when_a_table_is_used_again(module):
    """A reused table carries no bit over from its last use."""
    table = make_table()
    table.recomputed[:] = table.finite[:] = table.hist_valid[:] = 0xFF
    put(module, table, np.full(3, np.nan, np.float32), want=0)
    assert (table.recomputed[0] & 1, table.finite[0] & 1, table.hist_valid[0] & 1) == (0, 0, 0)


@pytest.mark.parametrize("commit", [kernels.commit, fallback.append])
def test_commit_writes_a_row_computed_elsewhere(commit):
    """A known row is appended as the kernel would have appended it."""
    array = np.array([1.0, 2.0, np.inf], np.float32)
    one, two = make_table(), make_table()
    put(_kernel, one, array, key=1, recomputed=1)
    row, offset, counts = run(array)
    bound = kernels.bind(two)
    assert commit(two if commit is fallback.append else bound, 1, 1, 1, 1, (3,), row, offset, counts) == 0
    assert one.cost[0] > 0 and two.cost[0] == 0  # what it cost us to compute: here nothing
    one.cost[0] = 0
    for name, _ in kernels.COLUMNS:
        assert np.array_equal(getattr(one, name), getattr(two, name), equal_nan=getattr(one, name).dtype.kind == "f"), (
            name
        )


def test_commit_without_histogram_or_elements():
    """A row may come without a histogram, or without values: then its statistics are undefined."""
    one, two = make_table(), make_table()
    for table, commit in ((one, kernels.commit), (two, fallback.append)):
        bound = kernels.bind(table)
        bound = table if commit is fallback.append else bound
        commit(bound, 0, 3, False, 1, (2, 2), (4, *EMPTY_ROW[1:]), 0, None)
        commit(bound, 0, 3, False, 1, (), (1, 0, 0, 0, 0, *(2.0,) * len(STATISTICS), 7), 0, np.zeros(0, np.uint32))
    for name, _ in kernels.COLUMNS:
        assert np.array_equal(getattr(one, name), getattr(two, name), equal_nan=getattr(one, name).dtype.kind == "f"), (
            name
        )
    assert one.finite[0] == one.hashed[0] == 2 and one.hist_valid[0] == 2 and one.call[:2].tolist() == [0, 1]
    with pytest.raises(TypeError):
        kernels.commit("no address", 0, 3, False, 1, (), EMPTY_ROW, 0, None)
