"""Compare two runs as a heat map: how far beyond the tolerance each site is at each step."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.diff.result import PairExcess
from tensortap.diff.runs import Side, diff_snapshots
from tensortap.errors import RunError
from tensortap.sinks.plain import PlainList
from tensortap.store.arrays import per_run
from tensortap.view.api.about import site_name
from tensortap.view.api.query import Query, RequestError

Array = npt.NDArray[Any]
COLUMNS: Final = 400  # of the heat map; beyond so many steps each column is the worst of several
_FLOOR: Final = -6.0  # a millionth of the tolerance and nothing at all look the same
_DIGITS: Final = 3
_AT_ONCE: Final = 1 << 16  # pairs


def difference(a: Side, b: Side, query: Query) -> dict[str, Any]:
    """Answer `from` and `to`; `every` tells how many steps a column of the heat map is the worst of."""
    first, second = a.snapshot, b.snapshot
    both = np.intersect1d(first.steps, second.steps)
    low, high = query.span(both)
    common = both[low:high]
    if not len(common):
        raise RequestError("the runs have no step in common here", "choose runs that recorded the same steps")
    whole = len(common) == len(both)
    found = diff_snapshots(a, b, steps=None if whole else common.tolist())
    columns = np.unique(found.steps)  # of several phases with one number the worst
    every = -(-len(columns) // COLUMNS)
    return {
        **found.to_dict(), "headline": found.headline, "remarks": list(found.remarks()), "every": every,
        "versions": [first.version, second.version],
        "heat": _heat(found.excess, columns, every, [site_name(triple) for triple in first.rows]),
    }  # fmt: skip


def _heat(pairs: PairExcess, steps: Array, every: int, order: list[str]) -> dict[str, Any]:
    """Return log10 of difference over tolerance, above 0 where it differs; the worst of calls, ranks and steps."""
    known = {name: i for i, name in enumerate(order)}
    present = np.flatnonzero(np.bincount(pairs.site, minlength=len(pairs.sites)))
    numbers = sorted(present.tolist(), key=lambda i: known.get(pairs.sites[i], len(known)))
    row = np.zeros(len(pairs.sites), np.int64)
    row[numbers] = np.arange(len(numbers))
    width = -(-len(steps) // every)
    value = np.full(len(numbers) * width, np.nan)
    for start in range(0, len(pairs.site), _AT_ONCE):
        site, step, excess = (part[start : start + _AT_ONCE] for part in pairs[1:])
        column = per_run(lambda found: np.searchsorted(steps, found) // every, step)
        np.fmax.at(value, row[site] * width + column, excess)
    sites = [pairs.sites[i] for i in numbers]
    drawn = np.round(_log(value.reshape(len(numbers), width)), _DIGITS)
    cells = drawn.astype(object)
    cells[np.isnan(drawn)] = None
    rows = [known.get(site, -1) for site in sites]
    return {"sites": sites, "rows": rows, "steps": steps[::every].tolist(), "value": PlainList(cells.tolist())}


def _log(excess: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.clip(np.log10(excess), _FLOOR, 30.0)


def both_named(query: Query) -> tuple[str, str]:
    """Return the two runs of a request."""
    a, b = query.text("a"), query.text("b")
    if not a or not b:
        given = ", ".join(f"{name}={value}" for name, value in (("a", a), ("b", b)) if value) or "none"
        raise RunError(f"two runs must be named to be compared, got {given}: write a=exp1 and b=exp2")
    return a, b
