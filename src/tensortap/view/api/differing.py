"""Two runs held against each other, as a heat map: how far beyond the tolerance each site is at each step."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tensortap.diff.runs import diff as hold
from tensortap.errors import RunError
from tensortap.view.api.query import AskedError, Query
from tensortap.view.api.seen import Watched

PAIRS: Final = 40_000  # about a tenth of a millisecond each; beyond so many, steps are left out evenly
_FLOOR: Final = -6.0  # a millionth of the tolerance and nothing at all look the same


def difference(a: Watched, b: Watched, asked: Query) -> dict[str, Any]:
    """`from` and `to`; `every` tells whether steps were left out."""
    seen, other = a.look(), b.look()
    both = np.intersect1d(seen.steps, other.steps)
    low, high = asked.span(both)
    common = both[low:high]
    if not len(common):
        raise AskedError("the runs have no step in common here", "choose runs that recorded the same steps")
    most = max(1, PAIRS // max(1, min(len(seen.row), len(other.row))))
    every = -(-len(common) // most)
    found = hold(a.run, b.run, steps=common[::every].tolist())
    return {
        **found.to_dict(), "every": every, "versions": [seen.version, other.version],
        "heat": _heat(found.table(), common[::every].tolist(), seen.names),
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


def both_named(asked: Query) -> tuple[str, str]:
    """The two runs of a request."""
    a, b = asked.text("a"), asked.text("b")
    if not a or not b:
        raise RunError("a difference is between two runs: give a= and b=")
    return a, b
