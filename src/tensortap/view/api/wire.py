"""Encode answers: plain values as JSON, numbers as binary columns that a browser maps without parsing.

Columns are one length (uint32), a JSON header padded to a multiple of eight bytes, and the arrays one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.sinks.plain import PlainList, encode, plain

KINDS: Final = {"f4": np.float32, "f8": np.float64, "i4": np.int32, "u1": np.uint8, "u4": np.uint32}
_STEP: Final = 8


class ColumnAnswer(NamedTuple):
    """An answer made of arrays, and what there is to say of them."""

    header: Mapping[str, Any]
    columns: Mapping[str, npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """How much room it takes."""
        return sum(column.nbytes for column in self.columns.values())


Answer = ColumnAnswer | Mapping[str, Any]


Buffer = bytes | memoryview


def encoded(answer: Answer) -> bytes:
    """Return an answer as it is sent."""
    return b"".join(buffers(answer))


def buffers(answer: Answer) -> list[Buffer]:
    """Return an answer as it is sent, one piece after the other: arrays of many megabytes are not copied."""
    return _column_buffers(answer) if isinstance(answer, ColumnAnswer) else [encode(plain(answer)).encode()]


def pack(answer: ColumnAnswer) -> bytes:
    """Return header and arrays, each at a multiple of eight bytes.

    >>> header, columns = unpack(pack(ColumnAnswer({"unit": "s"}, {"step": np.arange(3.0)})))
    >>> header["unit"], columns["step"]
    ('s', array([0., 1., 2.]))
    """
    return b"".join(_column_buffers(answer))


def _column_buffers(answer: ColumnAnswer) -> list[Buffer]:
    listed = PlainList()
    parts: list[Buffer] = []
    offset = 0
    for name, column in answer.columns.items():
        column = np.ascontiguousarray(column)
        listed.append({"name": name, "dtype": _kind(column), "shape": list(column.shape), "offset": offset})
        parts += [column.data.cast("B") if column.size else b"", bytes(-column.nbytes % _STEP)]
        offset += column.nbytes + -column.nbytes % _STEP
    header = encode(plain({**answer.header, "columns": listed})).encode()
    header += b" " * (-(4 + len(header)) % _STEP)
    return [len(header).to_bytes(4, "little") + header, *filter(len, parts)]


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return the other way: what the page does, for whoever reads answers in Python."""
    start = 4 + int.from_bytes(data[:4], "little")
    header = json.loads(data[4:start])
    columns = {}
    for column in header.pop("columns"):
        count = int(np.prod(column["shape"]))
        flat = np.frombuffer(data, KINDS[column["dtype"]], count, start + column["offset"])
        columns[column["name"]] = flat.reshape(column["shape"])
    return header, columns


def _kind(column: npt.NDArray[Any]) -> str:
    return next(name for name, kind in KINDS.items() if column.dtype == kind)
