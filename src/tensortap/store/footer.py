"""Give the footer of a Parquet file a checksum: the format has checksums of pages, none of what says where they are.

A flipped bit in a footer would change types, statistics or the sites and steps that it names, and nobody would notice.
The checksum lies in front of the footer, where no reader of Parquet looks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

_MARK: Final = b"ttfooter"
_CHECKSUM: Final = struct.Struct("<8sI")
_END: Final = struct.Struct("<I4s")  # the footer's length and Parquet's own mark


class _Footer(NamedTuple):
    start: int
    data: bytes


def add_footer_checksum(path: Path) -> None:
    """Put the checksum of its footer into a Parquet file that was just written."""
    with path.open("r+b") as file:
        footer = _read(file)
        file.seek(footer.start)
        file.write(_CHECKSUM.pack(_MARK, zlib.crc32(footer.data)) + footer.data)


def check_footer(file: IO[bytes]) -> None:
    """Raise ValueError when the checksum of a footer does not hold. Older files, and those of others, have none."""
    footer = _read(file)
    file.seek(max(footer.start - _CHECKSUM.size, 0))
    found = file.read(_CHECKSUM.size)
    file.seek(0)
    has_checksum = len(found) == _CHECKSUM.size and found.startswith(_MARK)
    if has_checksum and _CHECKSUM.unpack(found)[1] != zlib.crc32(footer.data):
        raise ValueError("the checksum of its footer does not hold")


def check_row_counts(metadata: Any) -> None:
    """Raise ValueError where a footer contradicts itself: older files have no checksum of it, and rows would be gone.

    Every group of rows says how many it has, and so does each of its columns.
    """
    flat = next((i for i in range(metadata.num_columns) if not metadata.schema.column(i).max_repetition_level), None)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    for group in groups:
        if flat is not None and group.column(flat).num_values != group.num_rows:
            raise ValueError(
                f"its footer names {group.num_rows} rows and {group.column(flat).num_values} values of one column"
            )
    if sum(group.num_rows for group in groups) != metadata.num_rows:
        raise ValueError(f"its footer names {metadata.num_rows} rows, and its groups have others")


def zero_columns(metadata: Any, names: Sequence[str]) -> set[str]:
    """Return the columns that are zero, or false, in every row, as far as the footer tells."""
    return _columns_that(_is_zero, metadata, names)


def null_columns(metadata: Any, names: Sequence[str]) -> set[str]:
    """Return the columns that have no value in any row, as far as the footer tells."""
    return _columns_that(_is_null, metadata, names)


def _columns_that(test: Callable[[Any], bool], metadata: Any, names: Sequence[str]) -> set[str]:
    """Return the columns that pass a test in every group of rows."""
    at = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)} if names else {}
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return {name for name in names if name in at and all(test(group.column(at[name])) for group in groups)}


def _is_null(column: Any) -> bool:
    said = column.statistics
    return bool(said is not None and said.has_null_count and said.null_count == column.num_values)


def _is_zero(column: Any) -> bool:
    said = column.statistics
    return bool(said is not None and said.has_min_max and not said.min and not said.max)


def _read(file: IO[bytes]) -> _Footer:
    """Return the footer with its length, to the end of the file."""
    size = file.seek(0, 2)
    if size < _END.size:
        raise ValueError(f"it is {size} bytes long, which is too short for Parquet")
    file.seek(size - _END.size)
    length, mark = _END.unpack(file.read(_END.size))
    if mark != b"PAR1" or length > size - _END.size:
        raise ValueError("it does not end as Parquet does")
    start = size - _END.size - length
    file.seek(start)
    return _Footer(start, file.read())
