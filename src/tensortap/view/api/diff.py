"""Compare two runs as a heat map: how far beyond the tolerance each site is at each step."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tensortap.diff.runs import Side, diff_snapshots
from tensortap.errors import RunError
from tensortap.view.api.about import site_name
from tensortap.view.api.query import Query, RequestError

PAIRS: Final = 40_000  # about a tenth of a millisecond each; beyond so many, steps are left out evenly
_FLOOR: Final = -6.0  # a millionth of the tolerance and nothing at all look the same


def difference(a: Side, b: Side, query: Query) -> dict[str, Any]:
    """Answer `from` and `to`; `every` tells whether steps were left out."""
    first, second = a.snapshot, b.snapshot
    both = np.intersect1d(first.steps, second.steps)
    low, high = query.span(both)
    common = both[low:high]
    if not len(common):
        raise RequestError("the runs have no step in common here", "choose runs that recorded the same steps")
    most = max(1, PAIRS // max(1, min(len(first.rows), len(second.rows))))
    every = -(-len(common) // most)
    found = diff_snapshots(a, b, steps=common[::every].tolist())
    return {
        **found.to_dict(), "every": every, "versions": [first.version, second.version],
        "heat": _heat(found.table(), common[::every].tolist(), [site_name(triple) for triple in first.rows]),
    }  # fmt: skip


def _heat(table: Any, steps: list[int], order: list[str]) -> dict[str, Any]:
    """log10 of how many times the tolerance: above 0 it differs; the worst of several calls and ranks."""
    known = {name: i for i, name in enumerate(order)}
    sites = sorted(set(table["site"].to_pylist()), key=lambda site: known.get(site, len(known)))
    row, column = {site: i for i, site in enumerate(sites)}, {step: i for i, step in enumerate(steps)}
    value = np.full((len(sites), len(steps)), np.nan)
    names = ("site", "step", "excess")
    for site, step, excess in zip(*(table[name].to_pylist() for name in names), strict=True):
        at = row[site], column[step]
        value[at] = np.fmax(value[at], _log(excess))
    return {"sites": sites, "rows": [known.get(site, -1) for site in sites], "steps": steps, "value": value.tolist()}


def _log(excess: float | None) -> float:
    if excess is None or np.isnan(excess):
        return np.nan
    return float(np.clip(np.log10(excess), _FLOOR, 30.0)) if excess > 0 else _FLOOR


def both_named(query: Query) -> tuple[str, str]:
    """Return the two runs of a request."""
    a, b = query.text("a"), query.text("b")
    if not a or not b:
        raise RunError("a difference is between two runs: give a= and b=")
    return a, b
