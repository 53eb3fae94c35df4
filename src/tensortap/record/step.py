"""What sinks receive: a closed step, and its records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensortap import markup, text
from tensortap.record.pending import PendingMetrics
from tensortap.record.table import Kept, Names, StepTable
from tensortap.reduce.statistics import COLUMNS, FIELDS
from tensortap.reduce.summary import Summary, describe, fields_of
from tensortap.types import DTYPES, Place

_OF_SUMMARY = frozenset(("dtype", "shape", *FIELDS, "hist_offset", "hist_counts"))
_OF_PLACE = frozenset(Place._fields)


@dataclass(frozen=True, slots=True, eq=False)
class Record(Mapping[str, Any]):
    """One row: where and when, what was seen, and why it was kept. A mapping from column names to values.

    `numbers` holds quantiles and what the user's own functions returned.
    """

    step: int
    phase: str
    rank: int
    place: Place
    call: int
    seq: int
    reason: str
    recomputed: bool
    time: int
    summary: Summary
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name in _OF_SUMMARY:
            return getattr(self.summary, name)
        if name in _OF_PLACE:
            return getattr(self.place, name)
        if name in COLUMNS:
            return getattr(self, name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMNS)

    def __len__(self) -> int:
        return len(COLUMNS)

    def __str__(self) -> str:
        call = f" call {self.call}" if self.call else ""
        return f"{self.place}{call} {describe(self.summary)}"

    def _repr_html_(self) -> str:
        call, why = f" call {self.call}" if self.call else "", f", kept because {self.reason}" if self.reason else ""
        own = [markup.line(f"{name} {text.number(value)}") for name, value in self.numbers.items()]
        title = markup.line(markup.element("b", str(self.place)), f"{call} at step {self.step}{why}")
        return markup.page(title, markup.Html(self.summary._repr_html_()), *own)


class _Shared(NamedTuple):
    reasons: tuple[str, ...]
    numbers: Mapping[int, Mapping[str, float]]


@dataclass(slots=True, eq=False)
class Step:
    """A closed step: its number, the user's metrics and labels, and the rows that were kept. Nothing changes it.

    It is not `frozen`, because one is made in every step, and setting the fields of a frozen class takes three times
    as long. `tensors_only` marks a look-back step whose rows were written when it closed; its tensors come now.
    """

    number: int
    phase: str
    rank: int
    time: int
    metrics: Mapping[str, float]
    table: StepTable
    names: Names
    tensors_only: bool = False
    numbered_by_phase: bool = False  # the number is one of its phase: another phase may have the same
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""  # the model that the step has trained, where there are several

    @property
    def pending(self) -> bool:
        """Return whether some of its values are still being copied from a device."""
        metrics = self.metrics
        return bool(self.table.pending) or (type(metrics) is PendingMetrics and metrics.waiting)

    def wait(self) -> None:
        """Wait for pending values."""
        self.table.wait()
        for name in self.metrics:
            self.metrics[name]

    @property
    def nbytes(self) -> int:
        """Return the bytes it takes in memory."""
        return self.table.nbytes

    def place(self, row: int) -> Place:
        """Return the place of a row."""
        return self.names.places[int(self.table.columns["key"][row])]

    def tensors(self) -> Iterator[tuple[Record, Kept]]:
        """Yield what was kept of tensors, each with its record."""
        shared = self._shared()
        for kept in self.table.tensors:
            yield self._record(kept.row, shared), kept

    def records(self) -> Iterator[Record]:
        """Return the rows, one by one."""
        shared = self._shared()
        return (self._record(row, shared) for row in range(self.table.rows))

    def record(self, row: int) -> Record:
        """Return one row."""
        return self._record(row, self._shared())

    def _shared(self) -> _Shared:
        """Look up what the rows share, once for all of them."""
        by_row: dict[int, dict[str, float]] = {}
        for value in self.table.values:
            by_row.setdefault(value.row, {})[value.name] = float(value.number)
        return _Shared(tuple(self.names.words["reason"]), by_row)

    def _record(self, row: int, shared: _Shared) -> Record:
        table = self.table
        return Record(
            step=self.number,
            phase=self.phase,
            rank=self.rank,
            place=self.place(row),
            call=int(table.columns["call"][row]),
            seq=int(table.columns["seq"][row]),
            reason=shared.reasons[int(table.columns["reason"][row])],
            recomputed=bool(table.columns["recomputed"][row >> 3] >> (row & 7) & 1),
            time=int(table.columns["time"][row]),
            summary=summary_of(table, row),
            numbers=shared.numbers.get(row, {}),
        )


def summary_of(table: StepTable, row: int) -> Summary:
    """Return the statistics of one row of a table."""
    offset, counts = table.histogram(row) or (None, None)
    return Summary(
        dtype=DTYPES[int(table.columns["dtype"][row])].name,
        shape=table.shape(row),
        hist_offset=offset,
        hist_counts=counts,
        **fields_of(table.columns[name][row].item() for name in FIELDS),
    )
