"""The base of sinks that take records and kept tensors one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from tensortap.record.step import Record, Step


class RecordSink:
    """A sink that takes records and kept tensors one by one; `tensortap export` replays a stored run through it.

    >>> class Names(RecordSink):
    ...     def record(self, record):
    ...         print(record.place)
    """

    def write(self, step: Step) -> None:
        """Hand on the records, metrics and tensors of a step. The rows of a `tensors_only` step were written before."""
        if not step.tensors_only:
            for record in step.records():
                self.record(record)
            if step.metrics:
                self.measured(step.number, step.rank, step.time, step.metrics)
        for record, kept in step.tensors():
            self.tensor(record, kept.kind, kept.array)
        self.flush()

    def record(self, record: Record) -> None:
        """Write one record."""

    def tensor(self, record: Record, kind: str, array: npt.NDArray[Any]) -> None:
        """Write what one reducer kept of a record's tensor."""

    def measured(self, step: int, rank: int, time: int, metrics: Mapping[str, float]) -> None:
        """Write the user's metrics of a step; `time` is in microseconds."""

    def flush(self) -> None:
        """Write out what is buffered. Called after every step."""

    def close(self) -> None:
        """Write out what is left."""
        self.flush()

    def __str__(self) -> str:
        return type(self).__name__
