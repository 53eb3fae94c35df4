"""Append raw tensors to a file that becomes a safetensors file where it lies: their bytes are written once.

A tail of tensors is two files. `_tail-<id>.data` has room for a header, and then the elements of one tensor after the
other. `_tail-<id>.arrows` is an Arrow stream with a row for each of them: name, type, shape, where in the data it lies,
and its CRC-32. Sealing writes the header into its room and renames the data. What does not fit the format in place
(damage, elements that are not aligned, a name that came twice) is copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.record.step import Step
from tensortap.record.table import Kept
from tensortap.reduce.buffers import NUMPY_DTYPES
from tensortap.reduce.kernel import crc32
from tensortap.store.files import Files, load_json
from tensortap.store.messages import FixedMessage
from tensortap.store.schema import TENSORS, batch_of_message, tensor_message
from tensortap.store.tail import Tail, TailFile, data_path
from tensortap.store.tensors import (
    Array,
    Stored,
    TensorKey,
    array_of_bytes,
    encoded_header,
    header_bound,
    key_of,
    tensors_of_any_step,
)

FIRST_ROOM: Final = 16 << 10
_MOST_ROOM: Final = 4 << 20
_SIZES: Final = {dtype.name: dtype.itemsize for dtype in NUMPY_DTYPES}


class TensorLayout:
    """The names, types, shapes and order of the tensors that a step keeps.

    Mostly the same in every step: a table remembers it.
    """

    def __init__(self, step: Step) -> None:
        kept = list(tensors_of_any_step(step))
        # Then all lie at multiples of their element's size, as readers of safetensors want it.
        self.order = sorted(range(len(kept)), key=lambda i: -kept[i].array.itemsize)
        self.kept = [kept[i]._replace(array=_outline(kept[i].array)) for i in self.order]
        self.sizes = [stored.array.nbytes for stored in self.kept]
        self.size = sum(self.sizes)
        self._signature, self._by_phase = _signature(step.table.tensors), step.numbered_by_phase

    @classmethod
    def of(cls, step: Step) -> TensorLayout:
        """Return the layout of a step's tensors."""
        table = step.table
        known: TensorLayout | None = table.derived.get(cls) if table.same else None
        if known is None or known._by_phase != step.numbered_by_phase or known._signature != _signature(table.tensors):
            known = table.derived[cls] = cls(step)
        return known

    @cached_property
    def bound(self) -> int:
        """How many bytes of a header the tensors take at most."""
        return header_bound(self.kept)

    @cached_property
    def message(self) -> FixedMessage:
        """The message that tells where they lie."""
        return tensor_message(self.kept)

    def bytes_of(self, step: Step) -> tuple[list[npt.NDArray[np.uint8]], list[int]]:
        """Return the elements of a step's tensors, in the order in which they lie, and their checksums."""
        tensors, raw, checksums = step.table.tensors, [], []
        for i in self.order:
            array = tensors[i].array
            # The buffer protocol does not know all types, such as bfloat16.
            part = array.view(np.uint8) if array.ndim and array.flags.c_contiguous else _flat_bytes(array)
            raw.append(part)
            checksums.append(crc32(part))
        return raw, checksums

    def message_for(self, number: int, begin: int, checksums: Sequence[int]) -> bytearray:
        """Return the message for a step whose bytes lie from `begin` on; valid until the next one."""
        places = tuple(accumulate(self.sizes[:-1], initial=begin))
        return self.message.of((number,) * len(places), places, checksums)


def _outline(array: Array) -> Array:
    """Return an array of the same type and shape that takes no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _signature(tensors: Sequence[Kept]) -> list[Any]:
    return [(row, kind, probe, array.dtype, array.shape) for row, kind, array, probe in tensors]


def _flat_bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class TensorTail(Tail):
    """The tail of a rank's small tensors. `room` are the bytes kept free for the header."""

    def __init__(self, path: Path, now: float, room: int) -> None:
        super().__init__(path, TENSORS, now)
        self.room = room
        self._data = TailFile(data_path(path), room)
        self._free = room - header_bound([])

    def append_tensors(self, step: Step, layout: TensorLayout) -> bool:
        """Append the tensors of a step; False, with nothing written, when the header has no room for them."""
        if self._free < layout.bound:
            return False
        self._free -= layout.bound
        (raw, checksums), begin = layout.bytes_of(step), self._data.size
        self._data.write_all(raw, layout.size)
        message = layout.message_for(step.number, begin, checksums)
        if self.rows:
            self.append_message(message, len(raw))
        else:  # Arrow begins a stream with the schema
            self.append(batch_of_message(message))
        self.size += self._data.size
        return True

    def more_room(self) -> int:
        """Return the room that the next tail should have, when this one has none left."""
        return min(2 * self.room, _MOST_ROOM)

    def close(self) -> bool:
        """End the stream and close both files."""
        self._data.close()
        return super().close()


def room_for(layout: TensorLayout) -> int:
    """Return the least room for a header, which these tensors fit into twice."""
    needed = 2 * (layout.bound + header_bound([]))
    return max(FIRST_ROOM, 1 << (needed - 1).bit_length())


class TailTensor(NamedTuple):
    """A tensor in a tail: its name, its index entry, and how to read it. `start` is where its bytes lie, or −1."""

    name: str
    entry: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    crc32: int
    read: Callable[[], Array]

    @property
    def stored(self) -> Stored:
        """The tensor with its elements."""
        return Stored(self.name, self.entry, self.read())


def tail_tensors(table: Any, tail: Path) -> tuple[list[TailTensor], bool]:
    """Return the tensors in a tail, none twice, and whether all rows of it could be understood."""
    found: dict[str, TailTensor] = {}
    whole, in_rows = True, "data" in table.column_names  # older versions kept the elements in the rows
    data = data_path(tail)
    size = 0 if in_rows or not data.exists() else data.stat().st_size
    for row in table.to_pylist():
        try:
            tensor = _in_row(row) if in_rows else _in_data(row, data, size)
            _check_name(tensor.name, key_of(load_json(tensor.entry)))
            found[tensor.name] = tensor
        except (ValueError, TypeError, KeyError, MemoryError):
            whole = False
    return list(found.values()), whole


def _check_name(name: str, key: TensorKey) -> None:
    """Raise ValueError where a name is not that of its entry: two damaged names may be equal, and hide a tensor."""
    expected = key.name()
    if name != expected and not name.startswith(f"{expected}~"):
        raise ValueError(f"a tensor is called {name!r}, and its entry is that of {expected!r}")


def _in_row(row: dict[str, Any]) -> TailTensor:
    array = array_of_bytes(row["dtype"], row["shape"], row["data"])
    return TailTensor(
        row["name"], row["entry"], row["dtype"], array.shape, start=-1, size=array.nbytes, crc32=0, read=lambda: array
    )


def _in_data(row: dict[str, Any], data: Path, size: int) -> TailTensor:
    begin, length, crc = row["offset"], row["size"], row["crc32"]
    count = int(np.prod(row["shape"], dtype=np.float64))
    if begin < 0 or length != count * _SIZES[row["dtype"]] or begin + length > size or min(row["shape"], default=0) < 0:
        raise ValueError(f"{row['name']} does not lie in its file")
    read = partial(_read, data, begin, length, crc, row["dtype"], row["shape"])
    shape = tuple(row["shape"])
    return TailTensor(row["name"], row["entry"], row["dtype"], shape, start=begin, size=length, crc32=crc, read=read)


def _read(data: Path, begin: int, length: int, crc: int, dtype: str, shape: Sequence[int]) -> Array:
    with data.open("rb") as file:
        file.seek(begin)
        raw = file.read(length)
    if len(raw) != length or crc32(raw) != crc:
        raise ValueError(f"the checksum of a tensor in {data.name} does not hold")
    return array_of_bytes(dtype, shape, raw)


def seal_in_place(files: Files, name: str, tail: Path, tensors: Sequence[TailTensor]) -> bool:
    """Make the data of a tail the safetensors file `name`; False, with nothing done, where it has to be copied."""
    data = data_path(tail)
    if not tensors or not data.exists():
        return False
    room, end = tensors[0].start, tensors[-1].start + tensors[-1].size
    header = encoded_header(tensors, room, name)
    if header is None or not _dense(tensors) or not _regular(data):
        return False
    with data.open("r+b") as file:
        file.write(header)
        file.truncate(end)  # what an append that failed has left
        file.flush()
        os.fsync(file.fileno())
    files.move(data, name)
    return True


def _dense(tensors: Sequence[TailTensor]) -> bool:
    """Return whether the tensors lie one after the other, each where a reader can take it for an array."""
    at = tensors[0].start
    for tensor in tensors:
        if tensor.start != at or at % _SIZES[tensor.dtype]:
            return False
        at += tensor.size
    return at > 0


def _regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
