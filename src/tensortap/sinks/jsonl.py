"""Write records as JSON lines."""

from __future__ import annotations

import os

from tensortap.record.step import Record
from tensortap.sinks.base import RecordSink
from tensortap.sinks.linefile import LineFile
from tensortap.sinks.plain import encode, row


class JsonLines(RecordSink):
    """Append one JSON object a record: the columns of a record and `numbers`.

    >>> import tempfile
    >>> sink = JsonLines(f"{tempfile.mkdtemp()}/records.jsonl")
    >>> sink.close()

    What is not finite is null, and the counts beside it say what happened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = LineFile(path)

    def record(self, record: Record) -> None:
        """Append one line."""
        self._file.add(encode(row(record)))

    def flush(self) -> None:
        """Write the buffered lines."""
        self._file.flush()

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._file.close()

    def __str__(self) -> str:
        return str(self._file.path)
