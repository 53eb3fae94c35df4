"""Summarise a run for the list of runs: its last metrics, a line over steps, NaN, and findings."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tensortap.store import facts
from tensortap.store.footer import zero_columns
from tensortap.store.snapshot import Snapshot
from tensortap.view.api.cache import SizedCache
from tensortap.view.api.metrics import Series, series_of

SHOWN: Final = 8  # metrics
POINTS: Final = 40  # of a line over steps
_BAD: Final = ("nan", "posinf")  # −Inf is not counted, since masks hold it


def card(snapshot: Snapshot, of_phase: Snapshot, cache: SizedCache, found: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a run in the list; `found` are the findings so far."""
    known = series_of(of_phase, cache)
    first = [name for name in known if "loss" in name.lower()]
    names = list(dict.fromkeys([*first, *known]))[:SHOWN]
    key = ("first nonfinite", str(snapshot.files), snapshot.version)
    bad = cache.get(key, lambda: first_nonfinite(snapshot), lambda step: 64)
    metric = [step for name in known if (step := _first_bad(known[name])) is not None]
    return {
        "ended_by": facts.ended_by(snapshot), "metrics": {name: _summed(known[name]) for name in names},
        "nonfinite": min([*metric, *([] if bad is None else [bad])], default=None),
        "counts": found.get("counts", {}), "headline": found.get("headline", ""),
        "running": bool(found.get("running")), "version": snapshot.version,
    }  # fmt: skip


def _summed(series: Series) -> dict[str, Any]:
    steps, values = series
    finite = values[np.isfinite(values)]
    last = float(values[-1]) if len(values) and np.isfinite(values[-1]) else None
    least = float(finite.min()) if len(finite) else None
    return {"last": last, "min": least, "bad": _first_bad(series), "line": _line(values), "steps": len(steps)}


def _line(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Return a few points of a line: means of equal stretches; None where anything was not finite."""
    parts = np.array_split(values, min(POINTS, len(values))) if len(values) else []
    with np.errstate(invalid="ignore", over="ignore"):
        means = [float(part.mean()) for part in parts]
    return [mean if np.isfinite(mean) else None for mean in means]


def _first_bad(series: Series) -> int | None:
    steps, values = series
    lost = steps[~np.isfinite(values)]
    return int(lost[0]) if len(lost) else None


def first_nonfinite(snapshot: Snapshot) -> int | None:
    """Return the first step with NaN or +Inf in a record; files without any are told by their footers."""
    sealed = [(o.steps[0][0], name) for f in snapshot.records for name, o in f.segments.items() if o.steps]
    steps = [step for table in snapshot.tails.values() if (step := _first_in(table)) is not None]
    for first, name in sorted(sealed):
        if steps and first >= min(steps):
            break
        step = _first_of_file(snapshot, name)
        steps += [] if step is None else [step]
    return min(steps, default=None)


def _first_of_file(snapshot: Snapshot, name: str) -> int | None:
    try:
        with snapshot.files.open(name) as source, pq.ParquetFile(source, page_checksum_verification=True) as file:
            if zero_columns(file.metadata, _BAD) >= set(_BAD):
                return None
            return _first_in(file.read(["step", *_BAD], use_threads=False))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError) as error:
        snapshot.catalog.mark_damaged(name, error)
        return None


def _first_in(table: Any) -> int | None:
    bad = pc.or_(pc.greater(table["nan"], 0), pc.greater(table["posinf"], 0))
    found = pc.min(table["step"].filter(bad)).as_py()
    return None if found is None else int(found)
