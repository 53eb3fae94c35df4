"""The numbers of a site over steps that a figure draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.store import queries
from tensortap.store.run import Run
from tensortap.store.series import Series
from tensortap.store.snapshot import Snapshot

Floats = npt.NDArray[np.float64]
_MOST_QUANTILES: Final = 2000  # steps; each quantile of a step is derived from its histogram


class Curves(NamedTuple):
    """By step: the range, the 5 % and 95 % quantiles where there are histograms, the mean; and the non-finite steps."""

    title: str
    steps: npt.NDArray[np.int64]
    low: Floats
    high: Floats
    mean: Floats
    q05: Floats | None
    q95: Floats | None
    bad: npt.NDArray[np.int64]


def curves_of(
    run: Run, site: str, *, port: str | None = None, slot: str | None = None, call: int | None = None,
    rank: int | None = None, phase: str | None = None,
) -> Curves:  # fmt: skip
    """Read the curves of one site, all from one snapshot: a live run may grow between two readings."""

    def read(snapshot: Snapshot) -> Curves:
        place = queries.place_named(snapshot, site, port, slot)
        return _curves(site, lambda stat: queries.series(snapshot, place, stat, call, rank, phase))

    return run.snapshots.read(read)


def _curves(site: str, series_of: Callable[[str], Series]) -> Curves:
    series = {stat: series_of(stat) for stat in ("min", "max", "mean", "nonfinite")}
    steps = series["mean"].steps
    low, high, mean = (np.asarray(series[stat].values, np.float64) for stat in ("min", "max", "mean"))
    q05, q95 = _quantiles(series_of) if len(steps) <= _MOST_QUANTILES else (None, None)
    title = f"{site} · {len(steps)} steps"
    bad = steps[np.asarray(series["nonfinite"].values) > 0]
    return Curves(title=title, steps=steps, low=low, high=high, mean=mean, q05=q05, q95=q95, bad=bad)


def _quantiles(series_of: Callable[[str], Series]) -> tuple[Floats | None, Floats | None]:
    found = [np.asarray(series_of(stat).values, np.float64) for stat in ("q0.05", "q0.95")]
    return (None, None) if np.isnan(found[0]).all() else (found[0], found[1])
