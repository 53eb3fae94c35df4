"""Read a shard: its vectors where they lie in the file, mapped into memory, the other columns by pyarrow.

A row group that we wrote has its vectors in one page without compression, that is as one run of bytes in the file. A
file that somebody wrote anew in another way is read all the same, by decoding it.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensortap.errors import HarvestError
from tensortap.harvest.rows import Array
from tensortap.store.files import Files, check_regular

_LONGEST_HEADER: Final = 512  # bytes of a page's header, at most
_PLACES: Final = ("sample", "position", "token")
_POPULATE_READ: Final = 22  # Linux: enter the pages now, in one go, and not one by one as rows are read
_INTEGER_FIELD: Final = 0x15  # in Thrift's compact protocol: the next field is an integer


class VectorRun(NamedTuple):
    """Vectors that lie behind each other: where, how many, and whose memory it is."""

    address: int
    rows: int
    owner: Any


class ShardFile:
    """One shard, open for reading. Raises HarvestError where it is missing or damaged."""

    def __init__(self, files: Files, path: str) -> None:
        self._path = path
        with self._explained():
            if files.local is not None:
                check_regular(Path(path), files.local)
            self._buffer = pa.py_buffer(_mapped(path) if files.local is not None else files.fs.cat_file(path))
            self._file = pq.ParquetFile(pa.BufferReader(self._buffer))

    def columns(self, names: list[str]) -> pa.Table:
        """Return some columns."""
        with self._explained():
            table = self._file.read(columns=names)
            if missing := [name for name in names if name not in table.column_names]:
                raise ValueError(f"it has no column {missing[0]!r}")
            for name in (name for name in names if name in _PLACES):
                table = table.set_column(table.column_names.index(name), name, table[name].cast(pa.int64()))
            return table

    def runs(self, name: str, size: int) -> list[VectorRun]:
        """Return where the vectors of a column lie, each of so many bytes."""
        with self._explained():
            kind = self._file.schema_arrow.field(name).type
            if kind != pa.binary(size):  # whoever copies from these addresses trusts the size
                raise ValueError(f"its {name} must be of {size} bytes each, got {kind}")
            groups = range(self._file.metadata.num_row_groups)
            return [run for group in groups for run in self._runs_in(group, name, size)]

    def _runs_in(self, group: int, name: str, size: int) -> list[VectorRun]:
        rows = self._file.metadata.row_group(group).num_rows
        at = self._offset(group, name, rows * size)
        if at is not None:
            return [VectorRun(self._buffer.address + at, rows, self._buffer)]
        decoded = self._file.read_row_group(group, columns=[name])[name].chunks
        if any(chunk.null_count for chunk in decoded):
            raise ValueError(f"its {name} are not all there")
        return [VectorRun(chunk.buffers()[1].address + chunk.offset * size, len(chunk), chunk) for chunk in decoded]

    def _offset(self, group: int, name: str, size: int) -> int | None:
        """Return where in the file a column's values begin, if they are one plain page of so many bytes."""
        index = self._file.schema_arrow.get_field_index(name)
        column = self._file.metadata.row_group(group).column(index)
        plain = column.compression == "UNCOMPRESSED" and not column.has_dictionary_page
        if not plain or self._file.schema.column(index).max_definition_level:
            return None
        begin, length = column.data_page_offset, column.total_compressed_size
        header = length - size
        if not 0 < header <= _LONGEST_HEADER or begin + length > self._buffer.size:
            return None
        if data_page_size(self._buffer[begin : begin + header].to_pybytes()) != size:
            return None
        return int(begin + header)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise HarvestError(f"{self._path} is in the manifest and missing: the harvest is damaged") from None
        except (pa.ArrowException, ValueError, KeyError, TypeError, IndexError) as error:
            raise HarvestError(f"{self._path} is damaged: {error}") from error
        except (HarvestError, MemoryError):
            raise
        except Exception as error:  # object stores have errors of their own, which are no OSError
            raise HarvestError(f"{self._path} cannot be read: {error}") from error


def data_page_size(header: bytes) -> int | None:
    """Return the size of the values behind the header of a data page; None where it is something else.

    >>> data_page_size(bytes([0x15, 0, 0x15, 0x80, 0x10, 0x15, 0x80, 0x10, 0x2C]))
    1024
    """
    numbers, at = [], 0
    for _ in range(2):  # the kind of page, and its size before compression
        if header[at : at + 1] != bytes([_INTEGER_FIELD]):
            return None
        value, shift, at = 0, 0, at + 1
        while at < len(header):
            value |= (header[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if header[at - 1] < 0x80:
                break
        numbers.append(value >> 1)  # numbers are never negative here, so that zigzag only doubles them
    return numbers[1] if numbers[0] == 0 else None


def vectors(column: pa.ChunkedArray, dtype: np.dtype[Any], width: int) -> Iterator[Array]:
    """Yield the vectors of a column of bytes, a block at a time, without copying them."""
    if column.type != pa.binary(width * dtype.itemsize) or column.null_count:
        raise HarvestError(f"vectors must be of {width * dtype.itemsize} bytes each, got {column.type}: it is damaged")
    for chunk in column.chunks:
        if len(chunk):
            flat = np.frombuffer(chunk.buffers()[1], dtype, len(chunk) * width, chunk.offset * width * dtype.itemsize)
            yield flat.reshape(len(chunk), width)


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:  # noqa: PTH123
        found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(found, "madvise"):
        found.madvise(mmap.MADV_WILLNEED)  # all of it is wanted soon: from a disk in one go, not page by page
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # older than 5.14
                found.madvise(_POPULATE_READ)
    return found
