"""Find and read the tensors that a run kept, sealed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tensortap.errors import RunError
from tensortap.store.catalog import TensorFiles
from tensortap.store.files import check_original
from tensortap.store.names import tensor_file
from tensortap.store.snapshot import Snapshot
from tensortap.store.tensor_tail import tail_tensors
from tensortap.store.tensors import Array, TensorKey, TensorReader, key_of, misplaced
from tensortap.types import Place

DAMAGE: Final = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, MemoryError)


class DamagedTensorError(RunError):
    """A tensor that was kept and cannot be read any more."""


class TensorEntry(NamedTuple):
    """A kept tensor and how to read it."""

    key: TensorKey
    read: Callable[[], Array]


class TensorRequest(NamedTuple):
    """A reader's choice of a tensor; None matches anything."""

    place: Place
    step: int
    call: int = 0
    kind: str | None = None
    rank: int | None = None
    probe: int | None = None
    phase: str | None = None

    def __str__(self) -> str:
        kind = f", kind {self.kind!r}" if self.kind else ""
        return f"{self.place} at step {self.step}, call {self.call}{kind}"

    def fits(self, key: TensorKey) -> bool:
        """Return whether this is (one of) the tensors that are meant."""
        return (
            (key.place, key.step, key.call) == (self.place, self.step, self.call)
            and self.kind in (None, key.kind)
            and self.probe in (None, key.probe)
            and (self.phase in (None, key.phase) or not key.phase)
            and not key.recomputed
        )


def kept_tensors(
    snapshot: Snapshot, step: int | None = None, ranks: Sequence[int] | None = None
) -> Iterator[TensorEntry]:  # fmt: skip
    """Return every kept tensor, or those in files that cover one step; none twice."""
    seen: set[tuple[int, str]] = set()
    for files in snapshot.tensors:
        if ranks is None or files.rank in ranks:
            for name, kept in sorted(_of_rank(snapshot, files, step), key=lambda found: found[1].key.step):
                if (files.rank, name) not in seen:
                    seen.add((files.rank, name))
                    yield kept


def read_again(snapshot: Snapshot, key: TensorKey) -> Array:
    """Return the tensor of a key that was listed in an earlier snapshot, wherever it lies now."""
    for kept in kept_tensors(snapshot, key.step, [key.rank]):
        if kept.key == key:
            return kept.read()
    raise FileNotFoundError(f"{key.name()} is not there any more")


def read_one(snapshot: Snapshot, request: TensorRequest) -> Array:
    """Return the one tensor that is meant, or raise an error that says what there is instead."""
    ranks = snapshot.ranks if request.rank is None else [request.rank]
    found = [kept for kept in kept_tensors(snapshot, request.step, ranks) if request.fits(kept.key)]
    if request.phase is None and len({kept.key.phase for kept in found}) > 1:
        found = [kept for kept in found if kept.key.phase == "train"]
    if len(found) == 1 or (found and {kept.key.kind for kept in found} == {"full"} and len(ranks) == 1):
        return found[0].read()  # two probes that both keep all of it keep the same
    if found:
        options = sorted({f"kind={k.kind!r}, rank={k.rank}, probe={k.probe}" for k, _ in found})
        raise RunError(f"several tensors were kept of {request}; say which: {' or '.join(options)}")
    raise RunError(f"no tensor was kept of {request}; {_instead(snapshot, request, ranks)}")


def _instead(snapshot: Snapshot, request: TensorRequest, ranks: Sequence[int]) -> str:
    kept = [tensor.key for tensor in kept_tensors(snapshot, None, ranks) if tensor.key.place == request.place]
    if not kept:
        return 'none was kept there at any step: probe it with keep=full(), e.g. probe("**", keep=full())'
    steps = sorted({key.step for key in kept}, key=lambda s: (abs(s - request.step), s))
    return f"kept there: {', '.join(sorted({k.kind for k in kept}))}; nearest steps {', '.join(map(str, steps[:5]))}"


def _of_rank(snapshot: Snapshot, files: TensorFiles, step: int | None) -> Iterator[tuple[str, TensorEntry]]:
    for name in files.names:
        found = tensor_file(name.rpartition("/")[2])
        if found and (step is None or found.first <= step <= found.last):
            yield from _of_file(snapshot, name, files.rank)
    for path in files.tails:
        table = snapshot.tensor_rows(path)
        tensors, whole = tail_tensors(table, path) if table is not None else ([], True)
        if not whole:
            snapshot.catalog.mark_damaged(path, "some of its tensors cannot be read")
        for tensor in tensors:
            key = key_of(json.loads(tensor.entry))
            yield tensor.name, TensorEntry(key, partial(_guarded, snapshot, path, tensor.read))


def _of_file(snapshot: Snapshot, name: str, rank: int) -> Iterator[tuple[str, TensorEntry]]:
    try:
        with snapshot.files.open(name) as file:
            reader = TensorReader(file)
            check_original(snapshot.files, name, reader.written_as)
            keys = reader.keys()
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        snapshot.catalog.mark_damaged(name, error)
        return
    if why := misplaced(name, rank, keys.values()):
        snapshot.catalog.mark_damaged(name, why)
    for tensor, key in keys.items():
        yield tensor, TensorEntry(key, lambda tensor=tensor: _read(snapshot, name, reader, tensor))  # type: ignore[misc]


def _read(snapshot: Snapshot, name: str, reader: TensorReader, tensor: str) -> Array:
    def read() -> Array:
        with snapshot.files.open(name) as file:
            return reader.read(tensor, file)

    return _guarded(snapshot, name, read)


def _guarded(snapshot: Snapshot, name: str | Path, read: Callable[[], Array]) -> Array:
    """Read a tensor; remember that its file is damaged where it cannot be."""
    try:
        return read()
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        snapshot.catalog.mark_damaged(name, error)
        raise DamagedTensorError(f"{name} is damaged: {error}") from error
