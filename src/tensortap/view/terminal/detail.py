"""One site in detail: its statistics step by step with the metrics, its quantiles and histogram."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from tensortap import text
from tensortap.record.step import Record
from tensortap.reduce import histogram as buckets
from tensortap.reduce.summary import Summary
from tensortap.sinks.plain import plain, row
from tensortap.store import facts, queries
from tensortap.store.snapshot import Snapshot
from tensortap.text import printable
from tensortap.view.terminal import formats
from tensortap.view.terminal.columns import Column, grid
from tensortap.view.terminal.overview import Overview
from tensortap.view.terminal.screen import Screen, head

QUANTILES: Final = (0.01, 0.05, 0.5, 0.95, 0.99)
_BINS: Final = 64
_HEIGHT: Final = 8
_BARS: Final = 10
_LEVELS: Final = " ▁▂▃▄▅▆▇█"

Metrics = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, slots=True, eq=False)
class SiteDetail:
    """One site's last records, and the metrics of their steps."""

    name: str
    records: list[Record]
    metrics: Metrics
    left_out: int
    line: str = ""  # of the watched code, where an operation is

    @property
    def last(self) -> Record:
        """Return the newest record."""
        return self.records[-1]

    def as_json(self, view: Overview) -> dict[str, Any]:
        """Return everything the terminal shows, as plain values."""
        first = view.first_bad and view.first_bad._asdict()
        return {
            **view.about,
            "site": self.name,
            **({"line": self.line} if self.line else {}),
            "nonfinite": {"records": view.bad_records, "first": first},
            "records": [row(record) | {"metrics": plain(self.metrics.get(record.step, {}))} for record in self.records],
            "left_out": self.left_out,
            "quantiles": {
                "approximate": True,
                "relative_error": buckets.RELATIVE_ERROR,
                "step": self.last.step,
                "values": {str(q): plain(self.last.summary.quantile(q)) for q in QUANTILES},
            },
        }


def read_detail(view: Overview, sites: list[str], most: int) -> SiteDetail:
    """Read the newest `most` steps (0: all) of the only site in view, and the step where it first was not finite."""
    steps = _picked(view, most)
    records = list(queries.records_in(queries.table(view.snapshot, sites, steps=steps, phase=view.phase)))
    line = facts.lines(view.snapshot).get(records[-1].place.site, "") if records[-1].place.op else ""
    metrics = _metrics(view.snapshot, set(steps))
    return SiteDetail(view.rows[0].name, records, metrics, view.records - len(records), line)


def _picked(view: Overview, most: int) -> list[int]:
    if not view.first_bad or not most:
        return view.steps[-most:]
    bad = view.steps.index(view.first_bad.step)
    return sorted({*view.steps[-most:], *view.steps[max(bad - 1, 0) : bad + 1]})


def _metrics(snapshot: Snapshot, steps: set[int]) -> Metrics:
    table = queries.metrics(snapshot)
    found: dict[int, dict[str, float]] = {}
    columns = (table[name].to_pylist() for name in ("step", "name", "value"))
    for step, name, value in zip(*columns, strict=True):
        if step in steps and value is not None:  # a label has none
            found.setdefault(step, {})[name] = value
    return found


def draw_detail(view: Overview, shown: SiteDetail, screen: Screen) -> None:
    """Draw the header, the steps, then the newest record with its histogram."""
    screen.draw(*head(view), Text())
    screen.draw(Text(printable(shown.name), style="bold"))
    if shown.line:
        screen.draw(Text(printable(shown.line), style="dim"))
    if shown.left_out:
        screen.draw(Text(f"… {shown.left_out} records left out; --limit 0 shows all", style="dim"))
    screen.draw(grid(list(_columns(shown)), shown.records, screen.width), Text())
    screen.draw(*_newest(shown.last, screen.width))


def _columns(shown: SiteDetail) -> Iterator[Column[Record]]:
    yield Column("step", lambda r: str(r.step), 99)
    for name in ("rank", "call"):
        if any(record[name] for record in shown.records):
            yield _key(name)
    yield Column(
        "nan/inf", lambda r: formats.nonfinite_text(r.summary), 10, lambda r: formats.nonfinite_style(r.summary)
    )
    for name, keep in (("mean", 8.0), ("std", 9.0), ("min", 5.0), ("max", 6.0)):
        yield _stat(name, keep)
    yield Column("zeros", lambda r: formats.zeros_text(r.summary), 7, lambda r: formats.zeros_style(r.summary))
    yield Column("histogram", lambda r: r.summary.bars(_BARS), 4.5, left=True)
    for n, name in enumerate(sorted({name for metrics in shown.metrics.values() for name in metrics})):
        yield _metric(name, shown.metrics, 6.5 - n / 4)
    for name in dict.fromkeys(name for record in shown.records for name in record.numbers):
        yield _value(name)
    yield Column("shape", lambda r: text.shape(r.summary.shape), 3, left=True)
    yield Column("dtype", lambda r: formats.SHORT_DTYPES.get(r["dtype"], r["dtype"]), 2, left=True)
    yield Column("kept because", lambda r: printable(r.reason), 1, left=True)


def _key(name: str) -> Column[Record]:
    return Column(name, lambda r: str(r[name]), 50)


def _stat(name: str, keep: float) -> Column[Record]:
    return Column(name, lambda r: formats.stat_text(r.summary, name), keep)


def _metric(name: str, metrics: Metrics, keep: float) -> Column[Record]:
    return Column(printable(name), lambda r: _number(metrics.get(r.step, {}).get(name)), keep, lambda r: "cyan")


def _value(name: str) -> Column[Record]:
    return Column(printable(name), lambda r: _number(r.numbers.get(name)), 4)


def _number(value: float | None) -> str:
    return "" if value is None else text.number(value)


def _newest(record: Record, width: int) -> Iterator[Text]:
    """Return quantiles and a larger histogram of one record, if its histogram was kept."""
    summary = record.summary
    if summary.hist_counts is None or not summary.finite:
        why = "no histogram was kept" if summary.finite else "no element is finite"
        yield Text(f"step {record.step}: {why}", style="dim")
        return
    if summary.min == summary.max:
        yield Text(f"step {record.step}: every finite element is {text.number(summary.min)}")
        return
    values = "  ".join(f"{100 * q:g}% {text.number(summary.quantile(q))}" for q in QUANTILES)
    yield Text(f"step {record.step}, quantiles (approximate, within {100 * buckets.RELATIVE_ERROR:g}%)")
    yield Text(f"  {values}")
    yield Text()
    yield from map(Text, _chart(summary, min(_BINS, max(width - 12, 8))))


def _chart(summary: Summary, bins: int) -> Iterator[str]:
    """Return bars over an axis from the minimum to the maximum, with counts at the side."""
    assert summary.hist_offset is not None
    assert summary.hist_counts is not None
    heights = buckets.rebin(
        summary.hist_offset, summary.hist_counts, summary.zeros, summary.min, summary.max, bins
    ).tolist()
    top = max(heights)
    for level in reversed(range(_HEIGHT)):
        label = {_HEIGHT - 1: text.number(top), 0: "0"}.get(level, "")
        yield f"{label:>9} │{''.join(_block(h / top * _HEIGHT - level) for h in heights)}".rstrip()
    yield f"{'':>9} └{'─' * bins}"
    yield _axis(summary.min, summary.max, bins)


def _block(height: float) -> str:
    return _LEVELS[max(0, min(8, math.ceil(height * 8)))]


def _axis(low: float, high: float, bins: int) -> str:
    """Return the labels of the axis: its ends, and zero where it lies between them, or else the middle."""
    span = high / 2 - low / 2  # halves, for the ends may be those of float64
    middle = 0.0 if low < 0 < high else low / 2 + high / 2
    line = [" "] * (bins + 20)
    for share, value in ((0.0, low), (1.0, high), ((middle / 2 - low / 2) / (span or 1), middle)):
        label = text.number(value)
        start = 11 + round(share * (bins - 1) - share * (len(label) - 1))
        if not "".join(line[start - 1 : start + len(label) + 1]).strip():
            line[start : start + len(label)] = label
    return "".join(line).rstrip()
