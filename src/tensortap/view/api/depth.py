"""Show one step by depth: how large activations and gradients are, layer by layer; and that over steps."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.reduce.statistics import COUNTS, NONFINITE
from tensortap.select.ports import RESULT_PORTS
from tensortap.store.snapshot import Snapshot, Triple
from tensortap.view.api.about import site_name
from tensortap.view.api.bins import bins_for, edges
from tensortap.view.api.grid import Floats, Grid
from tensortap.view.api.heat import CELLS
from tensortap.view.api.query import Query, RequestError
from tensortap.view.api.ranks import of_rank
from tensortap.view.api.rows import rows_of
from tensortap.view.api.stats import STATS
from tensortap.view.api.tiles import TiledGrids
from tensortap.view.api.wire import Answer, ColumnAnswer

NEAREST: Final = 11  # steps that are offered around the one asked for
_READ: Final = ("site", "port", "slot", "step", "numel", *COUNTS, "absmax", "std", "l2")


def depth(history: TiledGrids, snapshot: Snapshot, query: Query) -> Answer:
    """Answer `step` for one step, or `from`, `to`, `width` and `rank` for all of them at once."""
    if not len(snapshot.steps):
        raise RequestError("this run holds no records yet", "wait for its first step")
    return _one(snapshot, query) if query.text("step") else _over_steps(history, snapshot, query)


def _forward(snapshot: Snapshot) -> dict[Triple, int]:
    """Return the outputs, in order of execution."""
    return {triple: row for triple, row in snapshot.rows.items() if triple[1] == "output"}


def _over_steps(history: TiledGrids, snapshot: Snapshot, query: Query) -> ColumnAnswer:
    """Return standard deviations of outputs and root mean squares of their gradients, by bin and depth."""
    outputs = _forward(snapshot)
    width = min(query.width, max(16, CELLS // max(len(outputs), 1)))
    bins = bins_for(*query.span(snapshot.steps), width)
    back = np.array([snapshot.rows.get((site, "grad_output", slot), -1) for site, _, slot in outputs], np.int64)
    shown = of_rank(snapshot, query)
    forward = _means(history.grid(shown, STATS["std"], bins, np.array([*outputs.values()], np.int64)))
    backward = np.full(forward.shape, np.nan, np.float32)
    if (back >= 0).any():
        backward[:, back >= 0] = _means(history.grid(shown, STATS["rms"], bins, back[back >= 0]))
    sites = [{"i": row, "site": site_name(triple)} for triple, row in outputs.items()]
    columns: dict[str, Floats | npt.NDArray[np.float64]] = {
        "step": edges(bins, snapshot.steps)[: bins.size], "forward": forward, "backward": backward,
    }  # fmt: skip
    return ColumnAnswer({"sites": sites, "version": snapshot.version, "level": bins.level}, columns)


def _means(grid: Grid) -> Floats:
    """Return the means of a grid; +Inf where nothing was finite, which a logarithmic axis shows as such."""
    return grid.mean if grid.bad is None else np.where(np.isnan(grid.mean) & grid.bad, np.float32(np.inf), grid.mean)


def _one(snapshot: Snapshot, query: Query) -> dict[str, Any]:
    """Return the recorded step nearest to the one asked for."""
    at = int(np.abs(snapshot.steps - query.number("step")).argmin())
    step = int(snapshot.steps[at])
    rows = rows_of(snapshot, _READ, first=step, last=step, ports=RESULT_PORTS)
    found: dict[Triple, list[dict[str, Any]]] = {}
    for row in rows.to_pylist():
        found.setdefault((row["site"], row["port"], row["slot"]), []).append(row)
    low = min(max(0, at - NEAREST // 2), max(0, len(snapshot.steps) - NEAREST))
    sites = [
        {"i": row, "site": site_name(triple), **_summed(found[triple]), "grad": _gradient(found, triple)}
        for triple, row in _forward(snapshot).items()
        if triple in found
    ]
    return {"step": step, "steps": snapshot.steps[low : low + NEAREST], "sites": sites, "version": snapshot.version}


def _summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge several calls or ranks of a step: the mean std, the largest magnitude, and shares and counts of all."""
    spread = [row["std"] for row in rows if row["std"] is not None]
    numel = sum(row["numel"] for row in rows)
    return {
        "std": float(np.mean(spread)) if spread else None,
        "absmax": max((row["absmax"] for row in rows if row["absmax"] is not None), default=None),
        "zeros": sum(row["zeros"] for row in rows) / numel if numel else None,
        "nonfinite": sum(row[name] for row in rows for name in NONFINITE),
    }


def _gradient(found: dict[Triple, list[dict[str, Any]]], triple: Triple) -> float | None:
    """Return the root mean square of what flows back to an output; None when that was not recorded, or not finite."""
    rows = found.get((triple[0], "grad_output", triple[2]), [])
    finite = sum(row["numel"] - sum(row[name] for name in NONFINITE) for row in rows)
    return float(np.sqrt(sum(row["l2"] ** 2 for row in rows) / finite)) if finite > 0 else None
