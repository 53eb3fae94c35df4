"""Turn a record into the few named numbers and the plain histogram that experiment trackers take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.errors import ProbeError, suggest
from tensortap.record.step import Record
from tensortap.reduce.histogram import rebin
from tensortap.reduce.statistics import COUNTS, STATISTICS
from tensortap.reduce.summary import Summary
from tensortap.sinks.line import nonfinite

STATS: Final = ("mean", "std", "absmax", "zero_share", "nonfinite")
"""What trackers show of a tensor by default: few, because each is a chart."""

_DERIVED: Final[Mapping[str, Callable[[Summary], float]]] = {
    "zero_share": lambda s: s.zeros / max(s.numel, 1),
    "nonfinite": nonfinite,
}
KNOWN: Final = (*STATISTICS, *COUNTS, "numel", *_DERIVED)


class HistogramBins(NamedTuple):
    """A histogram with bins of equal width: one count less than there are edges."""

    counts: npt.NDArray[np.float64]
    edges: npt.NDArray[np.float64]


def stats_asked(stats: Iterable[str]) -> tuple[str, ...]:
    """Check and return the statistics that a sink was told to show.

    >>> stats_asked(["std", "l2"])
    ('std', 'l2')
    """
    asked = (stats,) if isinstance(stats, str) else tuple(stats)
    for name in asked:
        if name not in KNOWN:
            raise ProbeError(
                f"stats= must name statistics, got {name!r}.{suggest(name, KNOWN)} There are: {', '.join(KNOWN)}"
            )
    return asked


def tag(record: Record) -> str:
    """Return the record's name in a tracker, which groups by what is before the first slash: `blocks.3.mlp/output`."""
    place = record.place
    call = f"/call-{record.call}" if record.call else ""
    return f"{place.site or '(root)'}/{place.port}{place.slot}{call}"


def stream(rank: int, phase: str = "") -> str:
    """Return the name of the series that a rank and a phase belong to; empty for the training of the first rank.

    >>> stream(0, "train"), stream(0, "eval"), stream(2, "eval")
    ('', 'eval', 'rank-2/eval')
    """
    parts = [f"rank-{rank}" if rank else "", "" if phase == "train" else phase]
    return "/".join(part for part in parts if part)


def numbers(record: Record, stats: Iterable[str] = STATS) -> dict[str, float]:
    """Return the chosen statistics and the user's own numbers. What is not finite is left out; `nonfinite` counts it.

    >>> from tensortap.reduce.summary import summarize
    >>> from tensortap.types import Place
    >>> record = Record(0, "", 0, Place("fc"), 0, 0, "", False, 0, summarize([0.0, -3.0, float("nan")]))
    >>> numbers(record, ["mean", "absmax", "nonfinite"])
    {'mean': -1.5, 'absmax': 3.0, 'nonfinite': 1.0}
    """
    found = {name: float(_number(record.summary, name)) for name in stats} | dict(record.numbers)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def bins(summary: Summary, most: int = 64) -> HistogramBins | None:
    """Return the histogram of the finite elements in at most `most` bins of equal width; None when there is none.

    >>> from tensortap.reduce.summary import summarize
    >>> bins(summarize([1.0, 2.0, float("inf")]), 2).counts
    array([1., 1.])
    """
    if summary.hist_counts is None or summary.hist_offset is None or not summary.finite:
        return None
    low, high = widened(summary.min, summary.max)
    if summary.min == summary.max:
        return HistogramBins(np.array([float(summary.finite)]), np.array([low, high]))
    counts = rebin(summary.hist_offset, summary.hist_counts, summary.zeros, low, high, most)
    return HistogramBins(counts, np.linspace(low, high, most + 1))


def widened(low: float, high: float) -> tuple[float, float]:
    """Return the ends of a histogram; around a single value an interval, as a bar needs some width."""
    if low < high:
        return low, high
    room = abs(low) / 1000 or 1e-3
    return low - room, high + room


def _number(summary: Summary, name: str) -> Any:
    derived = _DERIVED.get(name)
    return getattr(summary, name) if derived is None else derived(summary)
