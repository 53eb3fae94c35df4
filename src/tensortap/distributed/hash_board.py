"""A small file in which a rank posts the hashes of its last steps, for other ranks to read.

Nobody waits: a step that a rank has not posted yet is read later. The file is a ring of slots, one a step, each with a
checksum, so that what is read while it is written is taken for missing.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

SLOTS: Final = 16
_HEADER: Final = struct.Struct("<QQ")  # slots, bytes of a slot
_SLOT: Final = struct.Struct("<qQI4x")  # step, rows, checksum
Rows = npt.NDArray[np.int64]  # four numbers each: the place's name, hash, group, whether it is constant


class PostedStep(NamedTuple):
    """What a slot holds."""

    step: int
    rows: Rows


class HashBoard:
    """Post this rank's hashes, and read those of others. `launch` keeps what an earlier launch left from being read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     boards = [HashBoard(lambda rank: Path(folder) / f"{rank}", rank, "launch") for rank in (0, 1)]
    ...     boards[0].post(7, np.array([[1, 2, 3, 0]]))
    ...     posted = boards[1].read(0, 7)
    >>> posted.step, posted.rows.tolist()
    (7, [[1, 2, 3, 0]])
    """

    def __init__(self, path: Callable[[int], Path], rank: int, launch: str) -> None:
        self._path = path
        self._own = path(rank)
        self._seed = zlib.crc32(launch.encode())
        self._size = 0
        with contextlib.suppress(OSError):
            self._own.unlink(missing_ok=True)

    def post(self, step: int, rows: Rows) -> None:
        """Write the hashes of a step, over those of the step that came so many slots before."""
        data = np.ascontiguousarray(rows, np.int64).tobytes()
        if _SLOT.size + len(data) > self._size:
            self._begin(2 * (_SLOT.size + len(data)))
        head = _SLOT.pack(step, len(rows), self._check(step, data))
        with self._own.open("r+b", buffering=0) as file:
            file.seek(_HEADER.size + step % SLOTS * self._size)
            file.write(head + data)

    def read(self, rank: int, step: int) -> PostedStep | None:
        """Return what a rank posted last in the slot of a step; None when there is nothing, or half of it."""
        try:
            with self._path(rank).open("rb", buffering=0) as file:
                slots, size = _HEADER.unpack(file.read(_HEADER.size))
                file.seek(_HEADER.size + step % slots * size)
                found = file.read(size)
            posted, count, check = _SLOT.unpack_from(found)
            data = found[_SLOT.size : _SLOT.size + 32 * count]
        except (OSError, struct.error, ZeroDivisionError, OverflowError):
            return None
        if check != self._check(posted, data):
            return None
        return PostedStep(posted, np.frombuffer(data, np.int64).reshape(-1, 4))

    def _begin(self, size: int) -> None:
        """Put an empty file there, in one go: a reader never finds half of it."""
        self._size = size
        self._own.parent.mkdir(parents=True, exist_ok=True)
        hidden = self._own.with_name(f".{self._own.name}.{os.getpid()}")
        with hidden.open("wb") as file:
            file.write(_HEADER.pack(SLOTS, size))
            file.truncate(_HEADER.size + SLOTS * size)
        hidden.replace(self._own)

    def _check(self, step: int, data: bytes) -> int:
        return zlib.crc32(data, zlib.crc32(struct.pack("<q", step), self._seed))
