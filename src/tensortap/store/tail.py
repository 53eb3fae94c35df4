"""Append to a tail: an Arrow stream that grows by one batch a step, with checksums of its messages beside it."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tensortap.reduce.kernel import crc32
from tensortap.store.names import DAMAGED

_OPTIONS = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
_BUFFER_BYTES = 1 << 20
_MOST_BUFFERS: Final = 512  # that one call writes
_PENDING_BYTES = 16 << 20  # what waits for its checksum, at most: it is read again for that
_CHECK: Final = struct.Struct("<QII")  # where a message begins, its length, its CRC-32; then its own
_OWN: Final = struct.Struct("<I")


class Tail:
    """Append batches, each of which reaches the operating system before `append` returns.

    After a failed append the stream may end in half a batch: close it and begin another. Readers take the whole
    batches of a stream and leave its torn end.
    """

    def __init__(self, path: Path, schema: Any, now: float) -> None:
        self.path = path
        self.opened = now
        self.rows = 0
        self.size = 0  # bytes in its files
        self.vocabulary = -1  # how many words the stream has, once a batch is in it
        self._file = TailFile(path)
        self._checks = TailFile(checks_path(path))
        self._buffer = pa.output_stream(self._file, buffer_size=_BUFFER_BYTES)
        self._stream = pa.ipc.new_stream(self._buffer, schema, options=_OPTIONS)
        self._checked = 0
        self._check_lock = threading.Lock()
        self._buffer.flush()
        self.size = self._file.size

    def append(self, batch: Any, vocabulary: int = -1) -> None:
        """Write one batch. Its checksum follows on the thread: after a kill the last batches are read without.

        `vocabulary` is how many words its dictionaries have, where later batches may come as messages.
        """
        self._stream.write_batch(batch)
        self._buffer.flush()
        self.vocabulary = vocabulary
        self._appended(batch.num_rows)

    def append_message(self, message: bytearray, rows: int) -> None:
        """Write one batch as a message. Its words are those that the stream has."""
        self._file.write(message)
        self._appended(rows)

    def append_rows(self, write: Callable[[bytearray, int], int], into: bytearray, rows: int) -> None:
        """Write one batch by a function that makes its message in `into` and writes it to a file."""
        file = self._file
        file.write_by(write, into)
        self.rows += rows
        self.size = file.size
        if self.size - self._checked > _PENDING_BYTES:
            self.write_checks()

    def _appended(self, rows: int) -> None:
        self.rows += rows
        self.size = self._file.size
        if self.size - self._checked > _PENDING_BYTES:
            self.write_checks()

    def sync(self) -> None:
        """Have the operating system write it to the disk. Any thread may: it does not touch the open file."""
        for path in (self.path, checks_path(self.path), data_path(self.path)):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def gone(self) -> bool:
        """Return whether somebody deleted the file under us."""
        return not self.path.exists()

    def close(self) -> bool:
        """End the stream; whatever happens, the file is closed. One that holds no row is removed: False."""
        with contextlib.suppress(OSError, pa.ArrowInvalid):
            self._stream.close()
            self._buffer.flush()
            self.write_checks()
        self._file.close()
        self._checks.close()
        if not self.rows:
            remove_tail(self.path)
        return self.rows > 0

    def write_checks(self) -> None:
        """Write the checksums of what was appended. Any thread may.

        Each message has its own: damage to a batch costs neither the schema nor a dictionary.
        """
        with self._check_lock:
            checks, at = [], self._checked
            with contextlib.suppress(OSError):  # the batches are written, only their checksums are not
                for data in _messages(self._read(at, self._file.size)):
                    check = _CHECK.pack(at, len(data), crc32(data))
                    checks.append(check + _OWN.pack(_own_checksum(check, self.path)))
                    at += len(data)
                self._checked = at
                self._checks.write(b"".join(checks))

    def _read(self, start: int, end: int) -> bytes:
        """Return what was written, from the file, whose pages are still in memory: no step has to keep a copy."""
        if start == end:
            return b""
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)


def _messages(data: bytes) -> Iterator[memoryview]:
    """Yield what was written message by message; what is none, such as the end of the stream, as it is."""
    source, rest = pa.BufferReader(data), memoryview(data)
    at = 0
    try:
        while at < len(data):
            pa.ipc.read_message(source)
            start, at = at, source.tell()
            yield rest[start:at]
    except (pa.ArrowException, OSError, EOFError):
        yield rest[at:]


class TailFile:
    """A file that is appended to, behind `room` bytes that stay free.

    After an error it takes no more: what Arrow still buffers would follow half a batch.
    """

    def __init__(self, path: Path, room: int = 0) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.closed = False
        self.size = room
        if room:
            os.ftruncate(self._fd, room)

    def write(self, data: bytes | bytearray) -> int:
        """Write all of it."""
        rest = memoryview(data)
        while rest and not self.closed:
            try:
                written = os.write(self._fd, rest)
            except OSError:
                self.close()
                raise
            self.size += written
            rest = rest[written:]
        return len(data)

    def write_all(self, parts: Sequence[Any], total: int) -> None:
        """Write several buffers of so many bytes in all, mostly by one call."""
        if self.closed or not total:
            return
        try:
            written = os.writev(self._fd, parts) if len(parts) <= _MOST_BUFFERS else 0
        except OSError:
            self.close()
            raise
        self.size += written
        if written < total:  # the disk is nearly full, or there are too many
            self.write(b"".join(parts)[written:])

    def write_by(self, write: Callable[[bytearray, int], int], into: bytearray) -> None:
        """Write what a function makes in `into` and writes to a file itself; it returns how much."""
        if not self.closed:
            try:
                self.size += write(into, self._fd)
            except OSError:
                self.close()
                raise

    def flush(self) -> None:
        """Do nothing: nothing waits here."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            self.closed = True
            os.close(self._fd)


class MessageChecksum(NamedTuple):
    """The checksum of the bytes of one message."""

    start: int
    end: int
    crc: int

    def holds(self, data: bytes) -> bool:
        """Return whether the bytes of a tail are those that were written."""
        return self.end <= len(data) and crc32(memoryview(data)[self.start : self.end]) == self.crc


def read_checks(path: Path) -> list[MessageChecksum]:
    """Return the checksums of a tail, without those that are damaged themselves or are another tail's.

    Tails of version 1 have none.
    """
    try:
        raw = checks_path(path).read_bytes() if checks_path(path).is_file() else b""
    except OSError:
        raw = b""
    size = _CHECK.size + _OWN.size
    found = []
    for at in range(0, len(raw) - size + 1, size):
        check, (own,) = raw[at : at + _CHECK.size], _OWN.unpack_from(raw, at + _CHECK.size)
        if own in (_own_checksum(check, path), crc32(check)):  # older ones do not tell whose they are
            start, length, crc = _CHECK.unpack(check)
            found.append(MessageChecksum(start, start + length, crc))
    return found


def _own_checksum(check: bytes, path: Path) -> int:
    """Return the checksum of a message's checksum, with the name of its tail in it."""
    return crc32(check + path.stem.encode())


def checks_path(path: Path) -> Path:
    """Return where a tail's checksums lie."""
    return path.with_suffix(".crc")


def data_path(path: Path) -> Path:
    """Return where the elements of a tail of tensors lie."""
    return path.with_suffix(".data")


def remove_tail(path: Path) -> None:
    """Delete a tail whose rows another file holds, and what lies beside it."""
    path.unlink(missing_ok=True)
    for beside in (checks_path(path), data_path(path)):
        _remove_beside(beside)


def keep_aside(path: Path) -> None:
    """Rename a tail that could not be read to its end, and what lies beside it."""
    for part in (path, checks_path(path), data_path(path)):
        if part.exists():
            part.replace(_aside(part))


def remove_orphans(folder: Path) -> None:
    """Finish what a kill between two files has interrupted: checksums and data go where their tail went.

    Only for who holds the lock of the rank: a tail that is begun has no checksums yet, never the other way round.
    """
    for beside in (*folder.glob("_tail-*.crc"), *folder.glob("_tail-*.data")):
        tail = beside.with_suffix(".arrows")
        if _aside(tail).exists():
            beside.replace(_aside(beside))
        elif not tail.exists():
            _remove_beside(beside)


def _remove_beside(path: Path) -> None:
    if not path.is_dir() or path.is_symlink():  # somebody may have put a folder there: that is not ours
        path.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + DAMAGED)
