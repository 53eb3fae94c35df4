"""Replay a stored run through a sink into another format."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from tensortap.errors import ProbeError, RunError, suggest
from tensortap.record.step import Record
from tensortap.reduce.summary import summarize
from tensortap.sinks.base import RecordSink
from tensortap.sinks.csv import Csv
from tensortap.sinks.jsonl import JsonLines
from tensortap.sinks.npy import Npy
from tensortap.sinks.tensorboard import TensorBoard
from tensortap.store.filters import all_of, step_filter
from tensortap.store.run import Run
from tensortap.store.tensors import TensorKey
from tensortap.types import Place

Advance = Callable[[int, int], None]
_BATCH: Final = 64
_ROWS: Final = 200_000
_TELL: Final = 1000


class ExportTarget(NamedTuple):
    """An export format: how to make its sink from a path, and which parts of a run are replayed through it."""

    sink: Callable[[Path], RecordSink]
    records: bool = True
    tensors: bool = False
    metrics: bool = False


TARGETS: Final[dict[str, ExportTarget]] = {
    "csv": ExportTarget(Csv),
    "jsonl": ExportTarget(JsonLines),
    "npy": ExportTarget(Npy, records=False, tensors=True),
    "tensorboard": ExportTarget(TensorBoard, metrics=True),
}


class Exported(NamedTuple):
    """What was written, and where."""

    path: str
    records: int
    tensors: int


def export(
    run: Run,
    to: str,
    path: str | os.PathLike[str],
    *,
    sites: list[str] | None = None,
    steps: Any = None,
    overwrite: bool = False,
    progress: Advance = lambda done, total: None,
) -> Exported:
    """Write the chosen records or tensors to `path`: whole, or not at all."""
    if to not in TARGETS:
        raise ProbeError(f"--to must be one of {', '.join(TARGETS)}, got {to!r}.{suggest(to, TARGETS)}")
    place = Path(path).absolute()
    _check(place, overwrite)
    hidden = place.with_name(f".{place.name}.partial-{os.getpid()}")
    try:
        records, tensors = _replay(run, TARGETS[to], hidden, sites, steps, progress)
        _remove(place)
        hidden.rename(place)
    finally:
        _remove(hidden)
    return Exported(str(path), records, tensors)


def default_path(run: Run, to: str) -> str:
    """Return the default path of an export: the run's name in the current folder."""
    return f"{run.path.rstrip('/').rpartition('/')[2]}.{to}"


def describe(done: Exported) -> str:
    """Return what was written, in a line."""
    if not done.records and not done.tensors:
        return f"{done.path}: nothing was there to write; full(), rows(), sample() keep tensors for npy"
    parts = [f"{count} {noun}" for count, noun in ((done.records, "records"), (done.tensors, "tensors")) if count]
    return f"{done.path}: {' and '.join(parts)} written"


def _replay(
    run: Run, target: ExportTarget, path: Path, sites: list[str] | None, steps: Any, progress: Advance
) -> tuple[int, int]:
    sink = target.sink(path)
    records = tensors = 0
    try:
        if target.records:
            for records, record in enumerate(_counted(run, sites, steps, progress), 1):  # noqa: B007
                sink.record(record)
        if target.tensors:
            for tensors, (record, key, array) in enumerate(_tensors(run, sites, steps), 1):  # noqa: B007
                sink.tensor(record, key.kind, array)
        if target.metrics:
            for row in run.metrics().filter(_numbers(steps)).to_pylist():
                sink.measured(row["step"], row["rank"], int(row["time"].timestamp() * 1e6), {row["name"]: row["value"]})
    finally:
        sink.close()
    return records, tensors


def _numbers(steps: Any) -> Any:
    """Return the filter for the metrics of chosen steps; labels have no value."""
    return all_of([pc.field("value").is_valid(), step_filter(steps)])


def _counted(run: Run, sites: list[str] | None, steps: Any, progress: Advance) -> Iterator[Record]:
    """Yield the records, reading some steps at a time to bound memory, and report progress."""
    numbers = run.table(sites=sites, steps=steps, columns=["step"])["step"].to_numpy()
    done = 0
    for some in _stretches(numbers):
        for record in run.records(sites=sites, steps=some):
            yield record
            done += 1
            if done % _TELL == 0:
                progress(done, len(numbers))


def _stretches(numbers: npt.NDArray[np.int64]) -> Iterator[list[int]]:
    """Yield steps in groups of about `_ROWS` rows."""
    steps, first = np.unique(numbers, return_index=True)
    group = np.sort(first) // _ROWS
    for number in np.unique(group):
        yield steps[group == number].tolist()


def _tensors(run: Run, sites: list[str] | None, steps: Any) -> Iterator[tuple[Record, TensorKey, npt.NDArray[Any]]]:
    """Yield every kept tensor with its record; records are looked up for some tensors at a time."""
    for some in _batched(run.tensors(sites=sites, steps=steps), _BATCH):
        wanted = sorted({key.step for key, _ in some})
        known = {_identity(record): record for record in run.records(sites=sites, steps=wanted)}
        for key, array in some:
            yield known.get(tuple(key._replace(kind=""))) or _record(key, array), key, array


def _batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(itertools.islice(rest, size)):
        yield some


def _identity(record: Record) -> tuple[Any, ...]:
    place = record.place
    key = TensorKey(
        step=record.step, rank=record.rank, site=place.site, port=place.port, slot=place.slot, call=record.call,
        kind="", recomputed=record.recomputed,
    )  # fmt: skip
    return tuple(key)


def _record(key: TensorKey, array: npt.NDArray[Any]) -> Record:
    """Return a record for a tensor whose row is missing, computed from the tensor itself."""
    place = Place(key.site, key.port, key.slot)
    return Record(
        step=key.step, phase="", rank=key.rank, place=place, call=key.call, seq=0, reason="",
        recomputed=key.recomputed, time=0, summary=summarize(array),
    )  # fmt: skip


def _check(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    if not overwrite:
        raise RunError(f"{path} exists already and is left as it is; name another path or add --overwrite")
    if path.is_dir() and any(path.iterdir()) and not _exported(path):
        raise RunError(f"{path} is a folder that no export wrote; it is not overwritten. Name another path")


def _exported(folder: Path) -> bool:
    """Return whether a folder is one that an export writes: of `.npy` files, or of TensorBoard's events alone."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return (folder / "index.jsonl").is_file() or all(path.name.startswith("events.out.tfevents.") for path in files)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
