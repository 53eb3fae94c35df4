"""The orders in which sites can be shown: the worst first, by name, by execution, by a number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

from tensortap.sinks.line import dead, nonfinite
from tensortap.view.terminal.overview import SiteRow

FAR: Final = 2.0  # decades from the median of the port
_SMALLEST: Final = 1e-30
_KEPT: Final = ("param", "buffer")  # ports of what the model keeps: a constant is no fault there


def worst_first(rows: Sequence[SiteRow]) -> list[SiteRow]:
    """Sort: not finite now, not finite earlier, dead, far from the other sites; the rest stays in order of execution.

    Among sites that are not finite the first to become so leads: that is where to look. Far is `FAR` decades from the
    median of the port: in a healthy network the layers of a port lie nearer to each other than that.
    """
    usual = _usual(rows)
    return sorted(rows, key=lambda row: _trouble(row, usual))


def _trouble(row: SiteRow, usual: dict[str, tuple[float, float]]) -> tuple[float, ...]:
    summary = row.record.summary
    if row.first_bad:
        return (0 if nonfinite(summary) else 1, row.first_bad.step, row.first_bad.seq)
    if dead(summary) and not _fresh(row):
        return (2, -summary.zeros / summary.numel, row.record.seq)
    apart = 0.0
    if summary.numel > 1 and not _fresh(row):
        spread, top = usual[row.record.place.port]
        apart = max(abs(_log(_spread(row)) - spread), _log(absmax(row)) - top)
    return (3, -round(apart, 6)) if apart >= FAR else (4,)


def _usual(rows: Sequence[SiteRow]) -> dict[str, tuple[float, float]]:
    """Return the median magnitude of spread and |max| at each port: gradients are compared with gradients."""
    ports = defaultdict(list)
    for row in rows:
        if not _fresh(row):
            ports[row.record.place.port].append(row)
    return {
        port: (median(_log(_spread(r)) for r in some), median(_log(absmax(r)) for r in some))
        for port, some in ports.items()
    }


def _fresh(row: SiteRow) -> bool:
    """Return whether it is a bias or a running mean of zeros, as they begin: that is no fault."""
    summary = row.record.summary
    return row.record.place.port in _KEPT and len(summary.shape) < 2 and not absmax(row)


def _spread(row: SiteRow) -> float:
    """Return the std; of parameters the root mean square, for the weights of a norm are all 1 as they should be."""
    summary = row.record.summary
    return math.hypot(summary.mean, summary.std) if row.record.place.port in _KEPT else summary.std


def absmax(row: SiteRow) -> float:
    """Return the largest finite magnitude; 0 when there is none."""
    found = row.record.summary.absmax
    return found if math.isfinite(found) else 0.0


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
