"""Keep records in memory, for notebooks and tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy.typing as npt

from tensortap.errors import ProbeError
from tensortap.record.step import Record
from tensortap.sinks.base import RecordSink


class KeptTensor(NamedTuple):
    """What one reducer kept of a tensor, with the tensor's record."""

    record: Record
    kind: str
    array: npt.NDArray[Any]


class Memory(RecordSink):
    """Keep records, kept tensors and metrics; with `most`, the newest so many records and tensors.

    >>> memory = Memory(most=1000)
    >>> [record["max"] for record in memory.records if record.place.site == "fc"], memory.forgotten
    ([], 0)
    """

    def __init__(self, most: int | None = None) -> None:
        if most is not None and most < 1:
            raise ProbeError(
                f"Memory(most=) must be a number of records of at least 1, got {most!r}; write Memory(most=1000)"
            )
        self.records: deque[Record] = deque(maxlen=most)
        self.tensors: deque[KeptTensor] = deque(maxlen=most)
        self.metrics: dict[int, dict[str, float]] = {}
        self.forgotten = 0

    def measured(self, step: int, rank: int, time: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""
        self.metrics.setdefault(step, {}).update(metrics)

    def record(self, record: Record) -> None:
        """Keep one record."""
        self.forgotten += len(self.records) == self.records.maxlen
        self.records.append(record)

    def tensor(self, record: Record, kind: str, array: npt.NDArray[Any]) -> None:
        """Keep a tensor of a record. The array is its keeper's own copy."""
        self.forgotten += len(self.tensors) == self.tensors.maxlen
        self.tensors.append(KeptTensor(record, kind, array))
