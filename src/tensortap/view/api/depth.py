"""One step through the network: how large what flows forward and backward is, by depth; and that over steps."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.select.ports import RESULT_PORTS
from tensortap.types import COUNTS
from tensortap.view.api.bins import bins_for, edges
from tensortap.view.api.block import Triple
from tensortap.view.api.grid import Floats
from tensortap.view.api.heat import CELLS, site_name
from tensortap.view.api.history import History
from tensortap.view.api.query import AskedError, Query
from tensortap.view.api.rows import rows_of
from tensortap.view.api.seen import Seen
from tensortap.view.api.stats import NONFINITE, STATS
from tensortap.view.api.wire import Answer, Columns

NEAREST: Final = 11  # steps that are offered around the one asked for
_READ: Final = ("site", "port", "slot", "step", "numel", *COUNTS, "min", "max", "std", "l2")


def depth(history: History, asked: Query) -> Answer:
    """`step` for one step, or `from`, `to`, `width` for all of them at once."""
    seen = history.watched.look()
    if not len(seen.steps):
        raise AskedError("this run holds no records yet", "wait for its first step")
    return _one(history, seen, asked) if asked.text("step") else _over_steps(history, seen, asked)


def _forward(seen: Seen) -> dict[Triple, int]:
    """The outputs, in order of execution."""
    return {triple: row for triple, row in seen.row.items() if triple[1] == "output"}


def _over_steps(history: History, seen: Seen, asked: Query) -> Columns:
    """Standard deviations of outputs and root mean squares of the gradients that arrive there, by bin and depth."""
    outputs = _forward(seen)
    width = min(asked.width, max(16, CELLS // max(len(outputs), 1)))
    bins = bins_for(*asked.span(seen.steps), width)
    back = np.array([seen.row.get((site, "grad_output", slot), -1) for site, _, slot in outputs], np.int64)
    forward = history.grid(seen, STATS["std"], bins, np.array([*outputs.values()], np.int64)).mean
    backward = np.full(forward.shape, np.nan, np.float32)
    if (back >= 0).any():
        backward[:, back >= 0] = history.grid(seen, STATS["rms"], bins, back[back >= 0]).mean
    sites = [{"i": row, "site": site_name(triple)} for triple, row in outputs.items()]
    columns: dict[str, Floats | npt.NDArray[np.float64]] = {
        "step": edges(bins, seen.steps)[: bins.size], "forward": forward, "backward": backward,
    }  # fmt: skip
    return Columns({"sites": sites, "version": seen.version, "level": bins.level}, columns)


def _one(history: History, seen: Seen, asked: Query) -> dict[str, Any]:
    """The recorded step nearest to the one asked for."""
    at = int(np.abs(seen.steps - asked.number("step")).argmin())
    step = int(seen.steps[at])
    rows = rows_of(history.watched.run, seen, _READ, first=step, last=step, ports=RESULT_PORTS)
    found: dict[Triple, list[dict[str, Any]]] = {}
    for row in rows.to_pylist():
        found.setdefault((row["site"], row["port"], row["slot"]), []).append(row)
    low = min(max(0, at - NEAREST // 2), max(0, len(seen.steps) - NEAREST))
    sites = [
        {"i": row, "site": site_name(triple), **_summed(found[triple]), "grad": _gradient(found, triple)}
        for triple, row in _forward(seen).items()
        if triple in found
    ]
    return {"step": step, "steps": seen.steps[low : low + NEAREST], "sites": sites, "version": seen.version}


def _summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Several calls or ranks of a step: the mean spread, the largest magnitude, and shares and counts of all."""
    spread = [row["std"] for row in rows if row["std"] is not None]
    ends = [abs(row[end]) for row in rows for end in ("min", "max") if row[end] is not None]
    numel = sum(row["numel"] for row in rows)
    return {
        "std": float(np.mean(spread)) if spread else None,
        "absmax": max(ends, default=None),
        "zeros": sum(row["zeros"] for row in rows) / numel if numel else None,
        "nonfinite": sum(row[name] for row in rows for name in NONFINITE),
    }


def _gradient(found: dict[Triple, list[dict[str, Any]]], triple: Triple) -> float | None:
    """The root mean square of what flows back to an output; None when that was not recorded, or not finite."""
    rows = found.get((triple[0], "grad_output", triple[2]), [])
    finite = sum(row["numel"] - sum(row[name] for name in NONFINITE) for row in rows)
    return float(np.sqrt(sum(row["l2"] ** 2 for row in rows) / finite)) if finite > 0 else None
