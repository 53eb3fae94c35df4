"""A tail: an Arrow stream that is appended to after every step, and read while it is."""

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
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.opened = now
        self.rows = 0
        self._file = pa.output_stream(os.fspath(path), buffer_size=_BUFFER_BYTES)
        self._stream = pa.ipc.new_stream(self._file, schema, options=_OPTIONS)

    def append(self, batch: Any) -> None:
        """Write one batch."""
        self._stream.write_batch(batch)
        self._file.flush()
        self.rows += batch.num_rows

    def sync(self) -> None:
        """Have the operating system write it to the disk."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def gone(self) -> bool:
        """Whether somebody deleted the file under us."""
        return not self.path.exists()

    def close(self) -> None:
        """End the stream; whatever happens, the file is closed."""
        with contextlib.suppress(OSError, pa.ArrowInvalid):
            self._stream.close()
        with contextlib.suppress(OSError, pa.ArrowInvalid):
            self._file.close()


def read_tail(path: str | os.PathLike[str]) -> Any:
    """The whole batches of a stream as one table with plain columns, or None when there is none yet."""
    batches: list[Any] = []
    try:
        source = pa.memory_map(os.fspath(path))
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        return None
    with contextlib.suppress(OSError, pa.ArrowInvalid, EOFError):  # a torn end; what came before it stays
        stream = pa.ipc.open_stream(source)
        for batch in stream:
            batches.append(batch)
    return pa.Table.from_batches(batches).unify_dictionaries() if batches else None
