"""Convert the argument `to=` to a sink."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

from tensortap.errors import ProbeError
from tensortap.record.sink import Sink
from tensortap.record.step import Record
from tensortap.sinks.base import RecordSink
from tensortap.sinks.console import Console
from tensortap.sinks.logger import Log


def as_sink(value: Any) -> Sink:
    """Return a sink for a logger, a text stream, a function of a record, or what has `write(step)` and `close()`.

    >>> print(as_sink(logging.getLogger("layers")), as_sink(print))
    logger 'layers' print()
    """
    if isinstance(value, logging.Logger):
        return Log(value)
    if isinstance(value, io.TextIOBase):
        return Console(value)  # type: ignore[arg-type]
    if isinstance(value, type):
        raise ProbeError(f"to={value.__name__} is the class itself; make one: to={value.__name__}(…)")
    if callable(getattr(value, "write", None)) and callable(getattr(value, "close", None)):
        return value  # type: ignore[no-any-return]
    if callable(value):
        return Function(value)
    raise ProbeError(
        f"to= must be a sink, got {value!r}; it takes a folder for the run, a logging.Logger, a function of a record, "
        "or an object with write(step) and close() such as Memory(), Console(), JsonLines(path), Csv(path), Npy(folder)"
    )


class Function(RecordSink):
    """Call a function with each record, on the writer's thread.

    >>> sink = Function(lambda record: print(record["site"], record["mean"]))
    """

    def __init__(self, function: Callable[[Record], Any]) -> None:
        self.function = function

    def record(self, record: Record) -> None:
        """Hand over one record."""
        self.function(record)

    def __str__(self) -> str:
        return f"{getattr(self.function, '__qualname__', type(self.function).__name__)}()"
