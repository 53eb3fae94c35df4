"""Show the user's metrics over the same steps: mean, least and greatest of each bin."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.store import facts, queries
from tensortap.store.arrays import array_of
from tensortap.store.snapshot import Snapshot
from tensortap.view.api.bins import bins_for, edges
from tensortap.view.api.cache import SizedCache
from tensortap.view.api.grid import Ints, as_floats
from tensortap.view.api.query import Query
from tensortap.view.api.ranks import SPREAD
from tensortap.view.api.wire import ColumnAnswer

Series = tuple[Ints, npt.NDArray[np.float64]]


def series_of(snapshot: Snapshot, cache: SizedCache, rank: int | None = None) -> dict[str, Series]:
    """Return each metric's steps and values, sorted by step; ranks follow each other, unless one is chosen."""

    def read() -> dict[str, Series]:
        table = queries.metrics(snapshot)
        table = of_phase(snapshot, table.filter(pc.is_valid(table["value"])))  # labels have none
        table = table if rank is None else table.filter(pc.equal(table["rank"], rank))
        steps, values = array_of(table["step"]), array_of(table["value"])  # `to_numpy` would import pandas
        names = np.array(table["name"].to_pylist(), object)
        return {str(name): (steps[names == name], values[names == name]) for name in dict.fromkeys(names)}

    key = ("metrics", str(snapshot.files), snapshot.phase, rank, snapshot.version)
    return cache.get(key, read, lambda found: sum(s.nbytes + v.nbytes for s, v in found.values()) + 64)


def of_phase(snapshot: Snapshot, table: Any) -> Any:
    """Return the metrics of the phase that is shown, and those without a phase.

    Where all steps are numbered in one sequence, a metric that only another phase has (a validation loss) stays too.
    """
    if not snapshot.phase:
        return table
    own = pc.is_in(pc.fill_null(table["phase"], ""), pa.array(["", snapshot.phase]))
    if not facts.numbered_phases(snapshot):
        own = pc.or_(own, pc.invert(pc.is_in(table["name"], pc.unique(table["name"].filter(own)))))
    return table.filter(own)


def metrics(snapshot: Snapshot, cache: SizedCache, query: Query) -> ColumnAnswer:
    """`from`, `to`, `width`, `rank`: `step` are the bins' first steps; NaN where a metric was not given, or was NaN.

    `bad` counts the values of a bin that were NaN or infinite, where any was.
    """
    known = series_of(snapshot, cache, None if query.text("rank") == SPREAD else query.number("rank"))
    all_steps = np.unique(np.concatenate([steps for steps, _ in known.values()])) if known else np.zeros(0, np.int64)
    bins = bins_for(*query.span(all_steps), query.width)
    low, high = bins.steps(len(all_steps))
    columns: dict[str, npt.NDArray[Any]] = {"step": edges(bins, all_steps)[: bins.size]}
    broken = {}
    for i, (name, (steps, values)) in enumerate(known.items()):
        at = np.searchsorted(all_steps, steps)
        inside = (at >= low) & (at < high)
        bin_of = (at[inside] >> bins.level) - bins.first
        columns |= {f"m{i}.{what}": part for what, part in _folded(bin_of, values[inside], bins.size).items()}
        if len(lost := steps[~np.isfinite(values)]):
            broken[name] = {"first": int(lost[0]), "count": len(lost)}
            lost_bins = bin_of[~np.isfinite(values[inside])]
            columns[f"m{i}.bad"] = np.bincount(lost_bins, minlength=bins.size).astype(np.float32)
    return ColumnAnswer({"names": list(known), "version": snapshot.version, "nonfinite": broken}, columns)


def _folded(bin_of: Ints, values: npt.NDArray[np.float64], count: int) -> dict[str, npt.NDArray[Any]]:
    """Return the mean, least and greatest of the finite values in each bin."""
    finite = np.isfinite(values)
    bin_of, values = bin_of[finite], values[finite]
    starts = np.flatnonzero(np.diff(bin_of, prepend=-1))
    parts = {name: np.full(count, np.nan) for name in ("mean", "min", "max")}
    if len(starts):
        at, sizes = bin_of[starts], np.diff(np.append(starts, len(values)))
        parts["mean"][at] = np.add.reduceat(values, starts) / sizes
        parts["min"][at] = np.minimum.reduceat(values, starts)
        parts["max"][at] = np.maximum.reduceat(values, starts)
    return {name: as_floats(part) for name, part in parts.items()}
