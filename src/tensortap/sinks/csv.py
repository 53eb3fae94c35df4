"""Write records as comma-separated values."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tensortap.errors import RunError
from tensortap.record.step import Record
from tensortap.reduce.statistics import COLUMNS
from tensortap.sinks.base import RecordSink
from tensortap.sinks.linefile import LineFile
from tensortap.sinks.plain import encode, plain

_COLUMNS: Final = (*COLUMNS, "numbers")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run such a text; a quote before it is text


class Csv(RecordSink):
    """Append one line a record: the columns of a record and `numbers`; lists and `numbers` are JSON text.

    >>> import tempfile
    >>> sink = Csv(f"{tempfile.mkdtemp()}/records.csv")
    >>> sink.close()

    A cell is empty where there is no number: no finite element, or no histogram taken.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        header = _line(_COLUMNS)
        _check_header(Path(path), header)
        self._file = LineFile(path, header)

    def record(self, record: Record) -> None:
        """Append one line."""
        self._file.add(_line([_cell(record[name]) for name in COLUMNS] + [encode(plain(record.numbers))]))

    def flush(self) -> None:
        """Write the buffered lines."""
        self._file.flush()

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._file.close()

    def __str__(self) -> str:
        return str(self._file.path)


def _line(cells: Iterable[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerow(cells)  # so that both characters are quoted inside a cell
    return out.getvalue()[:-2]


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return "" if math.isnan(value) else value
    return encode(plain(value))


def _check_header(path: Path, header: str) -> None:
    """Refuse to append to a file that has other columns."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline().rstrip("\r\n")
    if first != header:
        raise RunError(
            f"{path} already holds other columns ({first[:60]!r}…) and is left as it is; name another file: "
            f"Csv({str(path.with_stem(path.stem + '-2'))!r})"
        )
