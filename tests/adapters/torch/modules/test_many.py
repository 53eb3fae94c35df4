"""Several tensors recorded in one call of the kernel."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch
from torch import nn

from tensortap.adapters.torch.modules.tensors import TensorObserver
from tensortap.record.recorder import Recorder
from tensortap.reduce.reducers import full
from tensortap.select.probes import as_probes, probe
from tensortap.types import Place

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
NUMBERS = ("key", "call", "dtype", "probes", "numel", "nan", "posinf", "neginf", "zeros", "min", "max", "mean", "std")


def many() -> list[torch.Tensor]:
    """Tensors of every kind: dense and not, odd shapes, empty, with NaN, of types that only Python reads."""
    torch.manual_seed(0)
    dense = [(torch.randn(5, 7) * 9).to(kind) for kind in KINDS]
    odd = [torch.randn(4, 6).t(), torch.randn(3), torch.randn(3, 1), torch.tensor(2.0), torch.empty(0, 3)]
    odd += [
        torch.randn(3, dtype=torch.complex64),
        torch.randn(4).to_sparse(),
        torch.tensor([float("nan"), 1.0, -torch.inf]),
    ]
    return [*dense, *odd, nn.Parameter(torch.randn(300, 300)), torch.randn(1000, 17)[:, 3:9], torch.randn(2, 3)]


def recorded(tensors, together, keep=None):
    """The table of one step."""
    recorder = Recorder(as_probes([probe("**", keep=keep)]))
    observer = TensorObserver(recorder)
    observer.reads_in_c = together and observer.reads_in_c
    found = [(recorder.point(Place(f"p{i}", "param"), 1), tensor) for i, tensor in enumerate(tensors)]
    rows = observer.take_all(found, recorder.current)
    return rows, recorder.current.table


@pytest.mark.parametrize("times", [1, 40])
def test_rows_are_those_of_single_calls(times):
    """Statistics, histograms, shapes and order are the same bit for bit, also where the table has to grow."""
    tensors = many() * times
    rows, table = recorded(tensors, True)
    expected_rows, expected = recorded(tensors, False)
    assert rows == expected_rows == list(range(len(tensors)))
    for name in NUMBERS:
        assert np.array_equal(table.column(name), expected.column(name), equal_nan=name not in ("key", "call")), name
    for row in rows:
        (mine, theirs) = (t.histogram(row) for t in (table, expected))
        assert table.shape(row) == expected.shape(row) and (mine is None) == (theirs is None)
        assert mine is None or (mine[0] == theirs[0] and np.array_equal(mine[1], theirs[1]))


def test_kept_elements_and_unwanted_steps():
    """Tensors whose elements are kept go the way of single ones; in a step that no probe wants there are no rows."""
    rows, table = recorded([torch.ones(2, 3)] * 3, True, keep=full())
    assert rows == [0, 1, 2] and len(table.tensors) == 3
    recorder = Recorder(as_probes(["**"]))
    recorder.pause()
    points = [(recorder.point(Place(f"p{i}"), 1), torch.ones(2)) for i in range(3)]
    assert TensorObserver(recorder).take_all(points, recorder.current) == [-1, -1, -1]


def test_no_reference_is_kept_or_lost():
    """Recording leaves the counts of references as they were."""
    tensors = [torch.randn(5, 5) for _ in range(3)]
    before = [sys.getrefcount(t) for t in tensors]
    for _ in range(50):
        recorded(tensors, True)
    gc.collect()
    assert [sys.getrefcount(t) for t in tensors] == before
