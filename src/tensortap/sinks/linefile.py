"""Append whole lines to a text file, also after a full disk or a folder that was away for a while."""

from __future__ import annotations

import contextlib
import os
from io import FileIO
from pathlib import Path
from typing import Final

_BATCH: Final = 1 << 20


class LineFile:
    """Append lines; what `flush` could not write is dropped and leaves no torn line behind.

    >>> import tempfile
    >>> file = LineFile(Path(tempfile.mkdtemp()) / "new" / "a.txt", header="# head")
    >>> file.add("one"); file.close(); file.path.read_text().split()
    ['#', 'head', 'one']
    """

    def __init__(self, path: str | os.PathLike[str], header: str = "") -> None:
        self.path = Path(path).absolute()
        self._header = header
        self._waiting: list[str] = []
        self._size = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def add(self, line: str) -> None:
        """Take one line; it reaches the file with the next `flush`, or when a megabyte waits."""
        self._waiting.append(line)
        self._size += len(line)
        if self._size > _BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines."""
        if not self._waiting:
            return
        data = "".join(f"{line}\n" for line in self._waiting).encode("utf-8", "backslashreplace")
        self._waiting, self._size = [], 0
        if not self._in_place():
            self._file.close()
            self._file = self._open()
        self._write(data)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()

    def _open(self) -> FileIO:
        # Parent folders are made once, at set-up: made again here, they could hide a mount that went away.
        file = FileIO(self.path, "a+")
        end = file.seek(0, os.SEEK_END)
        if not end and self._header:
            file.write(f"{self._header}\n".encode())
        elif end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            file.write(b"\n")
        return file

    def _in_place(self) -> bool:
        """Return whether the open file is still the one at its path: writing to a deleted file would lose lines."""
        if self._file.closed:
            return False
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def _write(self, data: bytes) -> None:
        view, done = memoryview(data), 0
        end = self._file.seek(0, os.SEEK_END)
        try:
            while done < len(data):
                done += self._file.write(view[done:]) or 0
        except OSError:
            with contextlib.suppress(OSError):
                if self._file.seek(0, os.SEEK_END) == end + done:
                    self._file.truncate(end)
            raise
