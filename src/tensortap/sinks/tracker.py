"""The base of sinks for experiment trackers: a step becomes one row of named numbers and histograms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tensortap.record.step import Record
from tensortap.sinks.base import RecordSink
from tensortap.sinks.numbers import STATS, HistogramBins, bins, numbers, stats_asked, stream, tag


class TrackerRow(NamedTuple):
    """One step, as trackers take it: `values` by name such as `blocks.3.mlp/output/std`, histograms likewise."""

    step: int
    time: int
    values: dict[str, float]
    histograms: dict[str, HistogramBins]
    metrics: dict[str, float]


class Tracker(RecordSink):
    """Gather the records and metrics of a step, and send them as one row.

    >>> class Prints(Tracker):
    ...     def send(self, row):
    ...         print(row.step, row.values, row.metrics)
    >>> import numpy as np, tensortap as tt
    >>> with tt.watch(to=Prints(stats=["std"])) as watching:
    ...     _ = tt.tap(np.ones(3), "x")
    ...     watching.step(loss=0.5)
    0 {'x/output/std': 0.0} {'loss': 0.5}
    """

    def __init__(self, *, stats: Iterable[str] = STATS, histograms: bool = True) -> None:
        self._stats = stats_asked(stats)
        self._histograms = histograms
        self._row: TrackerRow | None = None

    def send(self, row: TrackerRow) -> None:
        """Hand a row to the tracker."""
        raise NotImplementedError

    def record(self, record: Record) -> None:
        """Put a record into its step's row. Recomputed ones are left out: the first has the same values."""
        if record.recomputed:
            return
        row = self._open(record.step, record.time)
        name = "/".join(filter(None, [stream(record.rank, record.phase), tag(record)]))
        row.values.update({f"{name}/{stat}": value for stat, value in numbers(record, self._stats).items()})
        drawn = bins(record.summary) if self._histograms else None
        if drawn is not None:
            row.histograms[f"{name}/histogram"] = drawn

    def measured(self, step: int, rank: int, time: int, metrics: Mapping[str, float]) -> None:
        """Put metrics into their step's row."""
        self._open(step, time).metrics.update({_ranked(rank, name): value for name, value in metrics.items()})

    def flush(self) -> None:
        """Send what there is."""
        row, self._row = self._row, None
        if row is not None:
            self.send(row)

    def close(self) -> None:
        """Send what is left; end the run if it is ours."""
        try:
            self.flush()
        finally:
            self.end()

    def end(self) -> None:
        """End what was begun for the tap. Called once, after the last row."""

    def _open(self, step: int, time: int) -> TrackerRow:
        if self._row is not None and self._row.step != step:
            self.flush()
        if self._row is None:
            self._row = TrackerRow(step, time, {}, {}, {})
        return self._row


def _ranked(rank: int, name: str) -> str:
    return f"{stream(rank)}/{name}" if rank else name


def plain_row(row: TrackerRow, prefix: str) -> dict[str, Any]:
    """Return the numbers of a row under a common prefix, which trackers show as a section of their page."""
    return {f"{prefix}{name}": value for name, value in row.values.items()}
