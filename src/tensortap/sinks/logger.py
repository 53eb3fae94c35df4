"""Send records to a `logging.Logger`."""

from __future__ import annotations

import logging

from tensortap.record.step import Record
from tensortap.sinks.base import RecordSink
from tensortap.sinks.line import line, nonfinite


class Log(RecordSink):
    """Log one line a record at INFO, at WARNING when it holds a NaN or an infinity.

    >>> sink = Log(logging.getLogger("layers"))

    The record itself is the log record's `tensortap` attribute, for handlers that want numbers.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    def record(self, record: Record) -> None:
        """Log one record."""
        level = logging.WARNING if nonfinite(record.summary) else logging.INFO
        if self.logger.isEnabledFor(level):
            self.logger.log(level, "%s", line(record), extra={"tensortap": record})

    def __str__(self) -> str:
        return f"logger {self.logger.name!r}"
