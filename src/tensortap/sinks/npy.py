"""Kept tensors as a folder of `.npy` files with an index, and its reader.

    index.jsonl                                     one line a file: what it is
    step-00000012/blocks.3.mlp-output-full.npy
    step-00000012/blocks.3.mlp-output-full.npy.dtype   only for types NumPy cannot name: the file holds integers

`index.jsonl` is the authority on what a file holds; names are for people.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensortap.errors import RunError
from tensortap.record.step import Record
from tensortap.sinks.base import RecordSink
from tensortap.sinks.linefile import LineFile
from tensortap.sinks.plain import encode, plain

Array = npt.NDArray[Any]
_UNSAFE: Final = re.compile(r"[^a-z0-9._]")
_LONGEST: Final = 150
_RESERVED: Final = frozenset(
    ["con", "prn", "aux", "nul", *(f"{device}{n}" for device in ("com", "lpt") for n in range(10))]
)


class NpyEntry(NamedTuple):
    """One line of the index: a file, and what it holds."""

    file: str
    step: int
    rank: int
    site: str
    port: str
    slot: str
    call: int
    recomputed: bool
    kind: str
    dtype: str
    shape: tuple[int, ...]


class Npy(RecordSink):
    """Write the samples, rows and full tensors that were kept, one file each; nothing is ever overwritten.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sink = Npy(folder)
    >>> sink.close()
    >>> load_npy(folder)
    {}
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self._index = LineFile(self.folder / "index.jsonl")

    def tensor(self, record: Record, kind: str, array: Array) -> None:
        """Write one file, then its line of the index: what the index names is whole."""
        stored, dtype = _storable(array)
        file = self._save(file_name(record, kind), stored, dtype if stored.dtype != array.dtype else "")
        about = {name: record[name] for name in ("step", "rank", "site", "port", "slot", "call", "recomputed")}
        self._index.add(encode(plain(NpyEntry(file, **about, kind=kind, dtype=dtype, shape=array.shape)._asdict())))

    def flush(self) -> None:
        """Write the buffered lines of the index."""
        self._index.flush()

    def close(self) -> None:
        """Write what is buffered and close the index."""
        self._index.close()

    def __str__(self) -> str:
        return str(self.folder)

    def _save(self, stem: str, array: Array, dtype: str) -> str:
        (self.folder / stem).parent.mkdir(exist_ok=True)
        path = _claim(self.folder, stem)
        try:
            if dtype:
                _sidecar(path).write_text(f"{dtype}\n", encoding="utf-8")
            np.save(path, array, allow_pickle=False)
        except BaseException:
            for written in (path, _sidecar(path)):
                with contextlib.suppress(OSError):
                    written.unlink(missing_ok=True)
            raise
        return path.relative_to(self.folder).as_posix()


def file_name(record: Record, kind: str) -> str:
    """Return `step-00000012/blocks.3.mlp-output-full`, without suffix; a key has the same name in every run.

    Where a name had to be changed or shortened (capitals too: not every file system tells them apart) a digest of
    the whole key keeps it unique.
    """
    place = record.place
    parts = [place.site, place.port + place.slot, kind]
    extra = [f"{word}{n}" for word, n in (("call", record.call), ("rank", record.rank)) if n]
    extra += ["recomputed"] if record.recomputed else []
    safe = [_safe(part) for part in parts]
    stem = "-".join([*safe, *extra])
    if safe != parts or len(stem) > _LONGEST:
        stem = f"{stem[:_LONGEST]}~{_digest([*parts, *extra])}"
    return f"step-{record.step:08d}/{stem}"


def _safe(part: str) -> str:
    part = _UNSAFE.sub("_", part.lower()).strip(".") or "_"
    return f"_{part}" if part.partition(".")[0] in _RESERVED else part


def _digest(parts: list[str]) -> str:
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=6).hexdigest()


def load_npy(path: str | os.PathLike[str]) -> Any:
    """Read what `Npy` wrote, in its true dtype: the array of a file, or `{NpyEntry: array}` of a whole folder."""
    path = Path(path)
    return dict(_load_folder(path)) if path.is_dir() else _load_file(path)


def _load_folder(folder: Path) -> Iterator[tuple[NpyEntry, Array]]:
    index = folder / "index.jsonl"
    if not index.is_file():
        raise RunError(f"{folder} has no index.jsonl: it was not written by Npy({str(folder)!r})")
    for line in index.read_text(encoding="utf-8").splitlines():
        entry = _entry(folder, line)
        if entry:
            yield entry, _load_file(folder / entry.file)


def _entry(folder: Path, line: str) -> NpyEntry | None:
    try:
        fields = json.loads(line)
        entry = NpyEntry(**fields)._replace(shape=tuple(fields["shape"]))
    except (ValueError, TypeError, KeyError):
        return None  # a line torn by a crash
    if not (folder / entry.file).resolve().is_relative_to(folder.resolve()):
        raise RunError(f"{folder / 'index.jsonl'} names a file outside its folder: {entry.file!r}")
    return entry


def _load_file(path: Path) -> Array:
    array: Array = np.load(path, allow_pickle=False)
    sidecar = _sidecar(path)
    if not sidecar.exists():
        return array
    name = sidecar.read_text(encoding="utf-8").strip()
    if not isinstance(getattr(ml_dtypes, name, None), type):
        raise RunError(f"{sidecar} names the type {name!r}, which this ml_dtypes does not have; update ml_dtypes")
    return array.view(np.dtype(getattr(ml_dtypes, name)))


def _storable(array: Array) -> tuple[Array, str]:
    """Return the array as NumPy can store it, and the name of its true dtype."""
    dtype = array.dtype
    registered = dtype.isbuiltin == 2  # by ml_dtypes: bfloat16, fp8 and smaller
    return (array.view(f"u{dtype.itemsize}") if registered else array), dtype.name


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.dtype")


def _claim(folder: Path, stem: str) -> Path:
    """Create a file of that name, numbered when the same tensor was kept twice."""
    number = 1
    while True:
        path = folder / (f"{stem}.npy" if number == 1 else f"{stem}-{number}.npy")
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
        number += 1
