"""Single operations of TensorFlow."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tt


def found(memory):
    return [str(record.place) for record in sorted(memory.records, key=lambda record: (record.step, record.seq))]


def test_eager(make, memory):
    """Every product is recorded under the layer that computes it."""
    model = make()
    with tt.watch(model, "op:MatMul", "first/BiasAdd", to=memory):
        model(np.ones((2, 6), np.float32))
    assert found(memory) == [
        "first/MatMul#0:output", "first/BiasAdd#0:output", "second/MatMul#0:output", "last/MatMul#0:output"
    ]  # fmt: skip
    assert {record["op"] for record in memory.records} == {"MatMul", "BiasAdd"}


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["graph", "xla"])
def test_in_a_graph(make, fit, memory, jit):
    """So it is in `fit`, with the same values as the layer's output where that is all it computes."""
    model = make(jit_compile=jit)
    with tt.watch(model, "op:@matmul", "second", to=memory):
        fit(model)
    assert found(memory)[:4] == [
        "first/MatMul#0:output", "second/MatMul#0:output", "second:output", "last/MatMul#0:output"
    ]  # fmt: skip
    assert {record.step for record in memory.records} == {0, 1, 2}
    products = {str(r.place): r["mean"] for r in memory.records if r.step == 0}
    assert products["second/MatMul#0:output"] == pytest.approx(products["second:output"])  # its bias is still zero


def test_names(make, memory):
    """An operation that TensorFlow does not have is refused, and one that never ran is counted."""
    model = make()
    with pytest.raises(tt.TensortapError, match="MatMul"):
        tt.watch(model, "op:MatMull", to=memory)
    with tt.watch(model, "op:Conv2D", to=memory) as tap:
        model(np.ones((2, 6), np.float32))
    assert tap.counts["unseen"] == 1
