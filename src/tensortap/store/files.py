"""Read and write the files of a run, in a local folder or at any fsspec address."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tensortap.errors import RunError
from tensortap.store.names import hidden_name

_TRIES: Final = 10
T = TypeVar("T")


class Files:
    """A folder, local or remote. Names are relative to it and use forward slashes.

    >>> files = Files("memory://example-run")
    >>> files.write("a/b.json", b"{}"); files.read("a/b.json"), files.list("a")
    (b'{}', ['b.json'])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.url = os.fspath(path)
        try:
            self.fs, root = url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise RunError(f"cannot use the path {self.url!r}: {error}") from error
        self.root = str(root).rstrip("/") or "/"
        self.local = Path(self.root) if isinstance(self.fs, LocalFileSystem) else None
        self._device: int | None = None

    def __str__(self) -> str:
        return self.url

    def path(self, name: str = "") -> str:
        """Return the full path of a name, as the file system wants it."""
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str = "") -> bool:
        """Return whether there is such a file or folder."""
        return bool(self.fs.exists(self.path(name)))

    def list(self, name: str = "") -> list[str]:
        """Return the names in a folder, sorted; none when there is no such folder."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path(name), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in found)

    def open(self, name: str) -> IO[bytes]:
        """Return a file for reading."""
        self.check(name)
        if self.local is not None:
            return open(self.path(name), "rb")  # noqa: PTH123 - a `Path` costs as much as the reading
        opened: IO[bytes] = self.fs.open(self.path(name), "rb")
        return opened

    def check(self, name: str) -> None:
        """Refuse what is not a regular file inside the run's folder: a run may come from anybody."""
        if self.local is not None:
            _check_regular(self.root, name)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        if self.local is not None:
            with self.open(name) as file:
                return file.read()
        return bytes(self.fs.cat_file(self.path(name)))

    def size(self, name: str) -> int:
        """Return a file's length in bytes."""
        return int(self.fs.size(self.path(name)) or 0)

    def write(self, name: str, data: bytes) -> None:
        """Put a whole file in place, never half of it."""
        with self.replacing(name, sync=False) as hidden:
            hidden.write_bytes(data)

    @contextlib.contextmanager
    def replacing(self, name: str, *, sync: bool = True) -> Iterator[Path]:
        """Give a local path to write to; when the block ends well, the file lies under `name`, whole and on disk."""
        hidden = self._hidden(name)
        self.make_folder(hidden.parent)
        hidden.touch()
        mode = hidden.stat().st_mode
        try:
            yield hidden
            hidden.chmod(mode)  # safetensors makes files only their owner may read
            if sync:
                _sync(hidden)
            self.move(hidden, name)
        finally:
            hidden.unlink(missing_ok=True)

    def move(self, local: Path, name: str) -> None:
        """Put a whole file in place that lies among the files that are appended to."""
        if self.local is not None:
            local.replace(self.local / name)
        else:
            self.fs.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
            self.fs.put_file(os.fspath(local), self.path(name))

    def remove(self, name: str) -> None:
        """Delete a file; nothing happens when it is gone already."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def remove_all(self, name: str) -> None:
        """Delete a file, or a folder with everything in it."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)

    def make_folder(self, folder: Path) -> None:
        """Make a local folder, again if it went away; but not on another disk, where it would hide a lost mount."""
        if folder.is_dir():
            self._device = self._device or folder.stat().st_dev
            return
        nearest = next(parent for parent in folder.absolute().parents if parent.exists())
        if self._device not in (None, nearest.stat().st_dev):
            raise OSError(f"{folder} was on another disk than {nearest} is; is it unmounted?")
        folder.mkdir(parents=True, exist_ok=True)
        self._device = folder.stat().st_dev

    def staging(self) -> Path:
        """Return a local folder for files that are appended to: the run itself; for a remote run, one in the cache."""
        if self.local is not None:
            return self.local
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return Path(base, "tensortap", hashlib.sha256(f"{self.fs.protocol}{self.root}".encode()).hexdigest()[:16])

    def _hidden(self, name: str) -> Path:
        folder, _, last = name.rpartition("/")
        return self.staging() / folder / hidden_name(last)


def check_regular(path: Path, root: Path) -> None:
    """Raise OSError unless this is a regular file, by a link or not, inside a folder."""
    _check_regular(os.fspath(root), path.relative_to(root).as_posix())


def _check_regular(root: str, name: str) -> None:
    """The same of names, which is quicker: it is done for every tensor that is read."""
    path = f"{root}/{name}"
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
        raise OSError(f"{path} is not a regular file; it is not read")
    if _has_link(root, name) and not Path(path).resolve().is_relative_to(Path(root).resolve()):
        raise OSError(f"{path} is a link that leads out of the run's folder; it is not followed")


def _has_link(root: str, name: str) -> bool:
    """Return whether a link, or a step up, is on the way from a folder to a file: then it has to be resolved."""
    parts = name.split("/")
    below = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
    return ".." in parts or any(stat.S_ISLNK(os.lstat(f"{root}/{part}").st_mode) for part in below)


def check_original(files: Files, name: str, written_as: str) -> None:
    """Raise ValueError when a file is a copy of one that is there: its rows would count twice.

    `written_as` is the name that it was written under, as it says itself. One that was only renamed is no copy.
    """
    if written_as not in ("", name) and files.exists(written_as):
        raise ValueError(f"it is a copy of {written_as}")


def load_json(data: bytes | str) -> Any:
    """Return what JSON text holds; ValueError for anything else, also for text that is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def retry_if_moved(read: Callable[[], T]) -> T:
    """Read again when a file was sealed or compacted away between listing and opening it."""
    for attempt in range(_TRIES):
        try:
            return read()
        except FileNotFoundError:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("unreachable")
