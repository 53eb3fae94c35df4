"""The orders in which sites can be shown: the worst first, by name, by execution, by a number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

from tensortap.sinks.line import dead, nonfinite
from tensortap.view.terminal.overview import SiteRow

_SMALLEST: Final = 1e-30


def worst_first(rows: Sequence[SiteRow]) -> list[SiteRow]:
    """Sort: not finite now, not finite earlier, dead, then by distance from the other sites.

    Among sites that are not finite the first to become so leads: that is where to look.
    """
    usual = _usual(rows)
    return sorted(rows, key=lambda row: _trouble(row, usual))


def _trouble(row: SiteRow, usual: dict[str, tuple[float, float]]) -> tuple[float, ...]:
    summary = row.record.summary
    if row.first_bad:
        return (0 if nonfinite(summary) else 1, row.first_bad.step, row.first_bad.seq)
    if dead(summary):
        return (2, -summary.zeros / summary.numel, row.record.seq)
    std, top = usual[row.record.place.port]
    apart = max(abs(_log(summary.std) - std), _log(absmax(row)) - top) if summary.numel > 1 else 0.0
    return (3, -round(apart, 6), row.record.seq)


def _usual(rows: Sequence[SiteRow]) -> dict[str, tuple[float, float]]:
    """Return the median magnitude of std and |max| at each port: gradients are compared with gradients."""
    ports = defaultdict(list)
    for row in rows:
        ports[row.record.place.port].append(row)
    return {
        port: (median(_log(r.record.summary.std) for r in some), median(_log(absmax(r)) for r in some))
        for port, some in ports.items()
    }


def absmax(row: SiteRow) -> float:
    """Return the largest finite magnitude; 0 when there is none."""
    ends = (row.record.summary.min, row.record.summary.max)
    return max((abs(end) for end in ends if math.isfinite(end)), default=0.0)


def _log(value: float) -> float:
    return math.log10(max(value, _SMALLEST)) if math.isfinite(value) else 0.0


def _largest(number: Callable[[SiteRow], float]) -> Callable[[Sequence[SiteRow]], list[SiteRow]]:
    def key(row: SiteRow) -> Any:
        value = number(row)
        return math.inf if math.isnan(value) else value

    return lambda rows: sorted(rows, key=key, reverse=True)


SORTS: Final[dict[str, Callable[[Sequence[SiteRow]], list[SiteRow]]]] = {
    "worst": worst_first,
    "order": list,
    "name": lambda rows: sorted(rows, key=lambda row: row.name),
    "std": _largest(lambda row: row.record.summary.std),
    "absmax": _largest(absmax),
    "zeros": _largest(lambda row: row.record.summary.zeros / max(row.record.summary.numel, 1)),
    "nan": _largest(lambda row: nonfinite(row.record.summary)),
}
