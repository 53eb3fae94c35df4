"""Append to and read a tail: an Arrow stream that grows by one batch a step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pyarrow as pa

_OPTIONS = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
_BUFFER_BYTES = 1 << 20


class Tail:
    """Appends batches, each of which reaches the operating system before `append` returns.

    After a failed append the stream may end in half a batch: close it and begin another. Readers take the whole
    batches of a stream and leave its torn end.
    """

    def __init__(self, path: Path, schema: Any, now: float) -> None:
        self.path = path
        self.opened = now
        self.rows = 0
        self._file = _File(path)
        self._buffer = pa.output_stream(self._file, buffer_size=_BUFFER_BYTES)
        self._stream = pa.ipc.new_stream(self._buffer, schema, options=_OPTIONS)

    def append(self, batch: Any) -> None:
        """Write one batch."""
        self._stream.write_batch(batch)
        self._buffer.flush()
        self.rows += batch.num_rows

    def sync(self) -> None:
        """Have the operating system write it to the disk. Any thread may: it does not touch the open file."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def gone(self) -> bool:
        """Return whether somebody deleted the file under us."""
        return not self.path.exists()

    def close(self) -> None:
        """End the stream; whatever happens, the file is closed. One that holds no row goes away."""
        with contextlib.suppress(OSError, pa.ArrowInvalid):
            self._stream.close()
            self._buffer.flush()
        self._file.close()
        if not self.rows:
            self.path.unlink(missing_ok=True)


class _File:
    """Where Arrow's bytes go. After an error it takes no more: what Arrow still buffers would follow half a batch."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.closed = False

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest and not self.closed:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except OSError:
                self.close()
                raise
        return len(data)

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._fd)


def read_tail(path: str | os.PathLike[str], length: int = -1, *, mapped: bool = False) -> Any:
    """Return the whole batches of a stream, or of its first `length` bytes, as one table; None when there is none yet.

    `mapped` saves a copy. A reader does without: a mapped file must not vanish from a network folder meanwhile.
    """
    batches: list[Any] = []
    try:
        data = pa.memory_map(os.fspath(path)) if mapped else pa.py_buffer(_first_bytes(path, length))
    except pa.ArrowInvalid:  # an empty file cannot be mapped
        return None
    with contextlib.suppress(OSError, pa.ArrowInvalid, EOFError):  # a torn end; what came before it stays
        batches.extend(pa.ipc.open_stream(data))
    return pa.Table.from_batches(batches).unify_dictionaries() if batches else None


def _first_bytes(path: str | os.PathLike[str], length: int) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(length)
