"""The extracted values of observed steps, kept until the step closes and then recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensortap.adapters.arrays import MOST_LOOPS, ArrayObserver
from tensortap.adapters.jax import kernel, rows
from tensortap.adapters.jax.extract import ExtractedValue
from tensortap.adapters.jax.selection import JaxSelection
from tensortap.adapters.jax.tag import Mark
from tensortap.record.recorder import OpenStep
from tensortap.reduce import graph_rows
from tensortap.types import DTYPE_CODE, DTYPES


class PendingResults:
    """The extracted values of one tap's steps."""

    def __init__(
        self,
        number: int,
        selection: JaxSelection,
        observer: ArrayObserver,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._number = number
        self._selection = selection
        self._observer = observer
        self._failed = failed
        self._pending: list[tuple[OpenStep, Sequence[ExtractedValue], Sequence[Any]]] = []

    def add(self, step: OpenStep, values: Sequence[ExtractedValue], arrays: Sequence[Any]) -> None:
        """Keep the values of a step."""
        self._pending.append((step, values, arrays))

    def record(self, step: OpenStep) -> None:
        """Record the pending values of one step."""
        pending, self._pending = self._pending, []
        for each in pending:
            if each[0] is not step:
                self._pending.append(each)
                continue
            try:
                self._record_step(*each)
            except Exception as error:
                self._failed("reading a step's statistics", error)

    def _record_step(self, step: OpenStep, values: Sequence[ExtractedValue], arrays: Sequence[Any]) -> None:
        for value, own in kernel.unpacked(values, arrays):
            marks = [mark for mark in value.marks if mark.tap == self._number]
            if not marks:
                continue
            try:
                self._record_value(step, value, marks, own)
            except Exception as error:  # the others are recorded nevertheless
                self._failed(f"reading the statistics of {marks[0].path}", error)

    def _record_value(self, step: OpenStep, value: ExtractedValue, marks: Sequence[Mark], arrays: list[Any]) -> None:
        if value.kind == "iterations":
            self._count_iterations(int(arrays[0].max()) - MOST_LOOPS)
            return
        flags = arrays.pop() if value.flagged else None
        for entry in np.ndindex(arrays[0].shape[: value.loops]) if value.loops else ((),):
            if flags is None or flags[entry]:
                for mark in marks:
                    self._record_entry(step, value, mark, [array[entry] for array in arrays])

    def _record_entry(self, step: OpenStep, value: ExtractedValue, mark: Mark, arrays: list[Any]) -> None:
        port = self._selection.port(mark)
        point = None if port is None else port.point(mark.slot)
        if point is None or not step.armed & point.probes:
            return
        if value.kind == "raw":
            array: Any = np.asarray(arrays[0])
        elif value.kind in kernel.WORDS:
            array = graph_rows.read(arrays[0], DTYPE_CODE[value.dtype], value.shape)
        else:
            numel, code = math.prod(value.shape), DTYPE_CODE[value.dtype]
            row, offset, counts = rows.read(tuple(arrays), numel, numel * DTYPES[code].itemsize)
            array = graph_rows.Reduced(row, offset, counts, code, value.shape)
        if value.kind != "raw" and point.keeping & step.armed:
            self._observer.recorder.counters.add("large_tensors")
        self._observer.take(point, array, step, value.recomputed)

    def _count_iterations(self, more: int) -> None:
        if more > 0:
            self._observer.recorder.counters.add("unseen_iterations", more)
