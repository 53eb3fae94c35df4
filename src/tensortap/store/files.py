"""Read and write the files of a run, in a local folder or at any fsspec address."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from tensortap.errors import RunError
from tensortap.store.names import hidden_name

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

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
        self._fs, root = _remote(self.url)
        self._process = os.getpid()
        self.root = root.rstrip("/") or "/"
        self.local = Path(self.root) if self._fs is None else None
        self._device: int | None = None

    def __str__(self) -> str:
        return self.url

    def path(self, name: str = "") -> str:
        """Return the full path of a name, as the file system wants it."""
        return f"{self.root}/{name}" if name else self.root

    @property
    def fs(self) -> AbstractFileSystem:
        """Return the file system of a remote folder."""
        assert self._fs is not None, "a local folder is read and written by the operating system's own calls"
        if self._process != os.getpid():  # a forked worker: connections and event loops stay behind
            self._fs, self._process = _remote(self.url)[0], os.getpid()
            assert self._fs is not None, "the same address names the same kind of file system"
        return self._fs

    def exists(self, name: str = "") -> bool:
        """Return whether there is such a file or folder."""
        if self.local is not None:
            return os.path.exists(self.path(name))  # noqa: PTH110 - a `Path` costs as much as the look
        return bool(self.fs.exists(self.path(name)))

    def list(self, name: str = "") -> list[str]:
        """Return the names in a folder, sorted; none when there is no such folder."""
        try:
            if self.local is not None:
                return sorted(os.listdir(self.path(name)))  # noqa: PTH208
            self.fs.invalidate_cache()
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
        if self.local is not None:
            return os.path.getsize(self.path(name))  # noqa: PTH202
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
            if self.local is not None:
                os.remove(self.path(name))  # noqa: PTH107
            else:
                self.fs.rm_file(self.path(name))

    def remove_all(self, name: str) -> None:
        """Delete a file, or a folder with everything in it."""
        path = self.path(name)
        with contextlib.suppress(FileNotFoundError):
            if self.local is None:
                self.fs.rm(path, recursive=True)
            elif os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
                shutil.rmtree(path)
            else:
                os.remove(path)  # noqa: PTH107

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


def check_writable(files: Files) -> None:
    """Raise where no run folder could be made, and leave nothing behind: a script may never have a model."""
    if files.local is None:
        return
    nearest = _nearest(files.local)
    try:
        Path(tempfile.mkdtemp(prefix=".tensortap-", dir=nearest)).rmdir()
    except OSError as error:
        raise RunError(unwritable(files, error)) from error


def unwritable(files: Files, error: OSError) -> str:
    """Return the sentence for a run folder that cannot be made or written: which, and why."""
    reason = error.strerror or str(error)
    why = f"{error.filename}: {reason}" if error.filename else reason
    if files.local is not None and not (nearest := _nearest(files.local)).is_dir():
        why = f"{nearest} is a file"
    elif files.local is not None and nearest != files.local.absolute():
        why = f"no folder can be made in {nearest} ({reason})"
    return f"the run folder {str(files)!r} cannot be written: {why}; give another path, e.g. to='runs/exp1'"


def _nearest(folder: Path) -> Path:
    """Return the folder itself or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _remote(url: str) -> tuple[AbstractFileSystem | None, str]:
    """Return the file system that an address names and the folder there; None where it is a path of this machine."""
    if "://" not in url and "::" not in url:
        return None, Path(os.path.expanduser(url)).absolute().as_posix()  # noqa: PTH111 - leaves `~nobody` as it is
    from fsspec.core import url_to_fs  # loads asyncio and more: not for those who write to their own disk
    from fsspec.implementations.local import LocalFileSystem

    try:
        fs, root = url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise RunError(f"cannot use the path {url!r}: {error}") from error
    return (None if isinstance(fs, LocalFileSystem) else fs), str(root)


def check_regular(path: Path, root: Path) -> None:
    """Raise OSError unless this is a regular file, by a link or not, inside a folder."""
    _check_regular(os.fspath(root), path.relative_to(root).as_posix())


def _check_regular(root: str, name: str) -> None:
    """Raise unless a path is a regular file in the folder. Fast, since it is done for every tensor that is read."""
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
