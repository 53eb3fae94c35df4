"""Records and metrics as TensorBoard's event files: scalars and histograms, grouped by module."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensortap.errors import needs
from tensortap.record.step import Record
from tensortap.sinks.base import RecordSink
from tensortap.sinks.crc import masked
from tensortap.sinks.ladder import ladder
from tensortap.sinks.numbers import STATS, numbers, stats_asked, stream, tag

_NUMBER: Final = itertools.count()
_MOST_VALUES: Final = 2000


class TensorBoard(RecordSink):
    """Writes `folder` so that `tensorboard --logdir folder` shows it, while the training runs.

    >>> import tempfile
    >>> sink = TensorBoard(tempfile.mkdtemp())      # tt.watch(model, to=[None, tt.TensorBoard("tb/")])
    >>> sink.close()

    A tensor is `blocks.3.mlp/output/std` and so on; `stats` says which numbers, and `histograms=False` leaves the
    histograms out. NaN and infinities are not in the histogram but counted in `…/nonfinite`. Metrics are
    `metrics/loss`. Evaluation steps are a run of their own (`eval`), and so is every rank but the first (`rank-1`).
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, stats: Iterable[str] = STATS, histograms: bool = True
    ) -> None:
        self.folder = Path(folder).absolute()
        self._stats = stats_asked(stats)
        self._histograms = histograms
        self._protos = _protos()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, _EventFile] = {}
        self._waiting: list[Any] = []
        self._when = _When("", 0, 0)

    def record(self, record: Record) -> None:
        """Take the numbers and the histogram of a record. What is computed again for backward is in it already."""
        if record.recomputed:
            return
        name = tag(record)
        found = numbers(record, self._stats)
        values = [self._protos.Value(tag=f"{name}/{stat}", simple_value=value) for stat, value in found.items()]
        values += self._histogram(name, record)
        self._add(_When(stream(record.rank, record.phase), record.step, record.time), values)

    def measured(self, step: int, rank: int, time: int, metrics: Mapping[str, float]) -> None:
        """Take metrics. One that is not finite is shown as TensorBoard shows it: by a triangle."""
        values = [self._protos.Value(tag=f"metrics/{name}", simple_value=value) for name, value in metrics.items()]
        self._add(_When(stream(rank), step, time), values)

    def flush(self) -> None:
        """Write what waits as one event."""
        values, self._waiting = self._waiting, []
        if values:
            summary = self._protos.Summary(value=values)
            self._file(self._when.stream).add(wall_time=self._when.time / 1e6, step=self._when.step, summary=summary)

    def close(self) -> None:
        """Write what is left and close the files."""
        try:
            self.flush()
        finally:
            for file in self._files.values():
                file.close()

    def __str__(self) -> str:
        return f"TensorBoard in {self.folder}"

    def _add(self, when: _When, values: list[Any]) -> None:
        if when[:2] != self._when[:2] or len(self._waiting) > _MOST_VALUES:
            self.flush()
        if not self._waiting:
            self._when = when
        self._waiting += values

    def _histogram(self, name: str, record: Record) -> Iterator[Any]:
        rungs = ladder(record.summary) if self._histograms else None
        if rungs is not None:
            yield self._protos.Value(tag=name, histo=self._protos.HistogramProto(**rungs._asdict()))

    def _file(self, name: str) -> _EventFile:
        if name not in self._files:
            self._files[name] = _EventFile(self.folder / name, self._protos)
        return self._files[name]


class _When(NamedTuple):
    """Where a value belongs: the run within the folder, the step, and the time in microseconds."""

    stream: str
    step: int
    time: int


class _Protos(NamedTuple):
    """TensorBoard's own messages."""

    Event: Any
    Summary: Any
    Value: Any
    HistogramProto: Any


def _protos() -> _Protos:
    # Its writer of files is left alone: that one imports TensorFlow wherever it is installed.
    with needs("TensorBoard(…)", "tensortap[tensorboard]"):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
    return _Protos(Event, Summary, Summary.Value, HistogramProto)


class _EventFile:
    """A file of events, begun anew after one that could not be written to its end: readers stop at a torn event."""

    def __init__(self, folder: Path, protos: _Protos) -> None:
        self._folder = folder
        self._event = protos.Event
        self._file: Any = None

    def add(self, **fields: Any) -> None:
        """Append one event."""
        try:
            if self._file is None:
                self._begin()
            self._write(**fields)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Let the file go."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, **fields: Any) -> None:
        data = _framed(self._event(**fields))
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, "only a part could be written", str(self._folder))

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBER)}"
        self._file = (self._folder / name).open("xb", buffering=0)
        self._write(wall_time=now, file_version="brain.Event:2")


def _framed(event: Any) -> bytes:
    """An event as the file holds it: its length, its bytes, and a checksum of each."""
    data: bytes = event.SerializeToString()
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked(head)) + data + struct.pack("<I", masked(data))
