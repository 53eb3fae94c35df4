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

import numpy as np
import numpy.typing as npt

from tensortap.errors import needs
from tensortap.record.step import Record
from tensortap.reduce.histogram import edges
from tensortap.reduce.summary import Summary
from tensortap.sinks.base import RecordSink
from tensortap.sinks.crc32c import masked
from tensortap.sinks.numbers import STATS, numbers, stats_asked, stream, tag, widened

_NUMBER: Final = itertools.count()
_MOST_VALUES: Final = 2000
_FINE: Final = 10  # octaves below the largest value; what is smaller lies within a pixel of zero
Floats = npt.NDArray[np.float64]


class TensorBoard(RecordSink):
    """Write `folder` so that `tensorboard --logdir folder` shows it, while the training runs.

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
        self._when = _EventKey("", 0, 0)

    def record(self, record: Record) -> None:
        """Take the numbers and the histogram of a record, unless it was recomputed and has the same values."""
        if record.recomputed:
            return
        name = tag(record)
        found = numbers(record, self._stats)
        values = [self._protos.Value(tag=f"{name}/{stat}", simple_value=value) for stat, value in found.items()]
        values += self._histogram(name, record)
        self._add(_EventKey(stream(record.rank, record.phase), record.step, record.time), values)

    def measured(self, step: int, rank: int, time: int, metrics: Mapping[str, float]) -> None:
        """Take metrics. TensorBoard shows one that is not finite as a triangle."""
        values = [self._protos.Value(tag=f"metrics/{name}", simple_value=value) for name, value in metrics.items()]
        self._add(_EventKey(stream(rank), step, time), values)

    def flush(self) -> None:
        """Write the buffered values as one event."""
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

    def _add(self, when: _EventKey, values: list[Any]) -> None:
        if when[:2] != self._when[:2] or len(self._waiting) > _MOST_VALUES:
            self.flush()
        if not self._waiting:
            self._when = when
        self._waiting += values

    def _histogram(self, name: str, record: Record) -> Iterator[Any]:
        fields = histogram_fields(record.summary) if self._histograms else None
        if fields is not None:
            yield self._protos.Value(tag=name, histo=self._protos.HistogramProto(**fields._asdict()))

    def _file(self, name: str) -> _EventFile:
        if name not in self._files:
            self._files[name] = _EventFile(self.folder / name, self._protos)
        return self._files[name]


class _EventKey(NamedTuple):
    """The run within the folder, the step, and the time in microseconds that a value belongs to."""

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
    """A file of events. After an incomplete write a new file is begun: readers stop at a torn event."""

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
        """Close the file."""
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
    """Return an event as the file holds it: its length, its bytes, and a checksum of each."""
    data: bytes = event.SerializeToString()
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked(head)) + data + struct.pack("<I", masked(data))


class HistogramFields(NamedTuple):
    """The fields of TensorBoard's histogram: bar `i` reaches from the limit before it to its own."""

    min: float
    max: float
    num: float
    sum: float
    sum_squares: float
    bucket_limit: list[float]
    bucket: list[float]


def histogram_fields(summary: Summary) -> HistogramFields | None:
    """Return the finite elements in our own buckets, those next to zero in three; None when there are none.

    TensorBoard draws bars without gaps from the smallest value to the largest.

    >>> from tensortap.reduce.summary import summarize
    >>> histogram_fields(summarize([1.0, 1.0, 4.0, float("nan")]))[-2:]
    ([1.125, 4.0, 4.5], [2.0, 0.0, 1.0])
    """
    if summary.hist_counts is None or summary.hist_offset is None or not summary.finite:
        return None
    ends = widened(summary.min, summary.max)
    low, high, count = _bars(summary.hist_offset, summary.hist_counts, summary.zeros, *ends)
    total = float(summary.finite)
    sums = (summary.mean * total, summary.l2 * summary.l2)
    return HistogramFields(float(low[0]), float(high[-1]), total, *sums, *_without_gaps(low, high, count))


def _bars(offset: int, run: npt.NDArray[Any], zeros: int, least: float, most: float) -> tuple[Floats, Floats, Floats]:
    """Return the ends and counts of all bars, from the smallest value to the largest."""
    used = np.flatnonzero(run)
    low, high = edges(offset + used)
    count = run[used].astype(np.float64)
    near = float(np.ldexp(1.0, int(np.frexp(max(abs(least), abs(most)))[1]) - 1 - _FINE))
    small = np.maximum(np.abs(low), np.abs(high)) <= near
    down, up = (count[small & side].sum() for side in (high <= 0, low >= 0))
    low = np.concatenate([low[~small], [-near, -near / 4, near / 4]])
    high = np.concatenate([high[~small], [-near / 4, near / 4, near]])
    count = np.concatenate([count[~small], [down, float(zeros), up]])
    order = np.argsort(low)
    order = order[count[order] > 0]
    low, high = low[order], high[order]
    left, right = np.maximum(low, least), np.minimum(high, most)
    wide = left < right  # else all of the bar's elements are the smallest or the largest, at its very edge
    return np.where(wide, left, low), np.where(wide, right, high), count[order]


def _without_gaps(low: Floats, high: Floats, count: Floats) -> tuple[list[float], list[float]]:
    """Return limits and counts, with an empty bar wherever two bars do not touch."""
    limits: list[float] = []
    counts: list[float] = []
    for left, right, number in zip(low.tolist(), high.tolist(), count.tolist(), strict=True):
        if limits and left > limits[-1]:
            limits.append(left)
            counts.append(0.0)
        limits.append(right)
        counts.append(number)
    return limits, counts
