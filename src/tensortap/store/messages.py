"""Messages of Arrow streams, made without asking Arrow again in every step.

The metadata of a batch says how many rows it has and where in the body each buffer lies; everything else in it is the
schema's. So Arrow makes it once for each table, and in every step only the lengths are filled in: by C for records, by
`struct` for metrics, whose number of rows does not change.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.record.table import StepTable
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import BY_NAME

Array = npt.NDArray[Any]

_NONE, _ROW, _BIT, _END, _BUCKET, _DIM = range(6)  # what a length is counted in, as csrc/message.h has it
_NO_BITMAP, _ALL_NULL = 0, 1
_PREFIX: Final = 8  # a marker and the length of the metadata


class _Buffer(NamedTuple):
    unit: int
    width: int
    data: Array | None  # None: zeros


class _Node(NamedTuple):
    """A column or the child of one: the unit of its length, where it has values, and its buffers."""

    unit: int
    validity: Array | int
    buffers: tuple[_Buffer, ...]


def validity(columns: dict[str, Array], name: str) -> Array | None:
    """Return the bitmap that says where a column has values; None where it always has."""
    if name == "hist_offset":
        return columns["hist_valid"]
    condition = BY_NAME[name].defined if name in BY_NAME else "always"
    return None if condition == "always" else columns[condition]


class RowWriter(Protocol):
    """Append the rows of a table to a file as one message, made in `into`; return its size. −1 is no file."""

    def __call__(self, into: bytearray, file: int) -> int:
        """Make the message, and write it."""


def record_writer(table: StepTable, batch: Any) -> RowWriter | None:
    """Return what appends the rows of a table, which `batch` is bound to.

    None where C cannot: without it, or where Arrow's metadata is not as expected.
    """
    if kernels.append_rows is None:
        return None
    layout = Layout.of(batch.slice(0, 1).serialize().to_pybytes())
    nodes = [node for field in batch.schema for node in _nodes(table.columns, field)]
    buffers = sum(1 + len(node.buffers) for node in nodes)
    if (layout.nodes, layout.buffers) != (len(nodes), buffers):
        return None
    plan = np.array([*layout.positions, len(nodes), *(number for node in nodes for number in _plan(node))], np.int64)
    return _RecordWriter(plan, table.columns, kernels.append_rows, table.bound, plan.ctypes.data, layout.metadata)


class _RecordWriter(functools.partial[int]):
    """A call of C, in every step. It keeps the arrays whose addresses are in the plan."""

    _kept: tuple[Any, ...]

    def __new__(cls, plan: Array, columns: dict[str, Array], write: Callable[..., int], *given: Any) -> _RecordWriter:
        made = super().__new__(cls, write, *given)
        made._kept = (plan, columns)
        return made


def _plan(node: _Node) -> list[int]:
    bitmap = node.validity if isinstance(node.validity, int) else node.validity.ctypes.data
    numbers = [node.unit, bitmap, len(node.buffers)]
    for unit, width, data in node.buffers:
        numbers += [unit, width, 0 if data is None else data.ctypes.data]
    return numbers


def _nodes(columns: dict[str, Array], field: Any) -> list[_Node]:
    """Return what Arrow writes of a column of records."""
    if field.name == "shape":
        return _list(columns["dims_ends"], columns["dims"], _DIM, _NO_BITMAP)
    if field.name == "hist_counts":
        return _list(columns["hist_ends"], columns["hist_counts"], _BUCKET, columns["hist_valid"])
    if field.name == "numbers":  # a map of which every row is null
        empty = _Buffer(_NONE, 0, None)
        pairs = [_Node(_NONE, _NO_BITMAP, (empty,) * count) for count in (0, 2, 1)]
        return [_Node(_ROW, _ALL_NULL, (_Buffer(_END, 4, None),)), *pairs]
    data, bitmap = columns[field.name], validity(columns, field.name)
    unit = _BIT if pa.types.is_boolean(field.type) else _ROW
    return [_Node(_ROW, _NO_BITMAP if bitmap is None else bitmap, (_Buffer(unit, data.itemsize, data),))]


def _list(ends: Array, data: Array, unit: int, bitmap: Array | int) -> list[_Node]:
    child = _Node(unit, _NO_BITMAP, (_Buffer(unit, data.itemsize, data),))
    return [_Node(_ROW, bitmap, (_Buffer(_END, ends.itemsize, ends),)), child]


class Layout(NamedTuple):
    """Where the numbers lie in the metadata of a batch, from the beginning of its message on."""

    metadata: bytes
    positions: tuple[int, int, int, int]  # of the batch's length, the body's length, the nodes and the buffers
    nodes: int
    buffers: int

    @classmethod
    def of(cls, message: bytes) -> Layout:
        """Find them in the message of a batch that has rows."""
        data = message[_PREFIX : _PREFIX + int(struct.unpack_from("<i", message, 4)[0])]
        body, batch = scalar(data, root(data), 3), table_in(data, root(data), 2)
        nodes, buffers = table_in(data, batch, 1), table_in(data, batch, 2)
        at = (scalar(data, batch, 0), body, nodes + 4, buffers + 4)
        counts = (int(struct.unpack_from("<I", data, where)[0]) for where in (nodes, buffers))
        return cls(message[: _PREFIX + len(data)], tuple(_PREFIX + where for where in at), *counts)  # type: ignore[arg-type]

    def buffer(self, number: int) -> int:
        """Return where a buffer begins in the message."""
        at = self.positions[3] + 16 * number
        return len(self.metadata) + int(struct.unpack_from("<q", self.metadata, at)[0])


class FixedMessage:
    """The message of a batch of which only some columns change from step to step."""

    def __init__(self, batch: Any, buffers: Sequence[tuple[int, str]]) -> None:
        """`buffers` are the numbers of those columns' buffers, each with the letter that `struct` has for its type."""
        self._message = bytearray(batch.serialize().to_pybytes())
        self._layout = Layout.of(bytes(self._message))
        self._columns = [(struct.Struct(f"<{batch.num_rows}{kind}"), self.buffer(at)) for at, kind in buffers]

    def buffer(self, number: int) -> int:
        """Return where a buffer begins in the message."""
        return self._layout.buffer(number)

    def of(self, *columns: Sequence[float]) -> bytearray:
        """Return the message with these columns, valid until the next one."""
        for (packed, at), values in zip(self._columns, columns, strict=True):
            packed.pack_into(self._message, at, *values)
        return self._message


# The little of flatbuffers that this takes.


def root(data: bytes) -> int:
    """Return where the root table lies."""
    return int(struct.unpack_from("<I", data, 0)[0])


def scalar(data: bytes, table: int, number: int) -> int:
    """Return where a field lies."""
    slots = table - struct.unpack_from("<i", data, table)[0]
    return table + int(struct.unpack_from("<H", data, slots + 4 + 2 * number)[0])


def table_in(data: bytes, table: int, number: int) -> int:
    """Return where a field that is a table or a vector begins."""
    at = scalar(data, table, number)
    return at + int(struct.unpack_from("<I", data, at)[0])
