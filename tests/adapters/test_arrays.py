"""Rows that a graph has computed, where they cannot be put."""

from __future__ import annotations

import numpy as np

from tensortap.adapters.arrays import ArrayCatcher, ArrayObserver
from tensortap.adapters.results import Captured
from tensortap.record.recorder import Recorder
from tensortap.reduce.graph_rows import Reduced
from tensortap.reduce.statistics import ROW
from tensortap.select.probes import probe
from tensortap.types import DTYPE_CODE, Place

COMPUTED = Reduced(tuple(np.ones(1, ROW)[0].tolist()), 0, None, DTYPE_CODE["float32"], (2,))


def test_a_row_that_comes_after_its_step_closed_is_counted() -> None:
    """Another thread may close a step between two rows of it."""
    recorder = Recorder([probe("**")])
    step = recorder.current
    step.table.close()
    ArrayObserver(recorder).take(recorder.point(Place("a"), 1), COMPUTED, step)
    assert recorder.counters.counts() == {"late_records": 1} and step.table.rows == 0


def test_a_tensor_too_large_to_leave_its_graph_is_not_captured() -> None:
    """There is only its row: it is counted, and hurts no other."""
    recorder, found = Recorder([probe("**")]), Captured()
    ArrayCatcher(recorder, found).take(recorder.point(Place("a"), 1), COMPUTED, recorder.current)
    assert recorder.counters.counts() == {"large_tensors": 1} and not list(found)
