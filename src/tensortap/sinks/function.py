"""Any function as a sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensortap.record.step import Record
from tensortap.sinks.base import RecordSink


class Function(RecordSink):
    """Calls a function with each record, on the writer's thread.

    >>> sink = Function(lambda record: print(record["site"], record["mean"]))
    """

    def __init__(self, function: Callable[[Record], Any]) -> None:
        self.function = function

    def record(self, record: Record) -> None:
        """Hand over one record."""
        self.function(record)

    def __str__(self) -> str:
        return f"{getattr(self.function, '__qualname__', type(self.function).__name__)}()"
