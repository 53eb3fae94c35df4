"""List the statistics a heat map can show: their columns, and how several records become one cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.errors import RunError, suggest
from tensortap.reduce.statistics import NONFINITE, REGISTRY, Statistic
from tensortap.select.ports import GRADIENT_PORTS

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[Any]]
Fold = Literal["mean", "sum", "min", "max"]


class Stat(NamedTuple):
    """One statistic. `ports` are those it means something at; none: all. `number` is the reducer's, if it is one."""

    name: str
    label: str
    columns: tuple[str, ...]
    of: Callable[[Columns], Floats]
    fold: Fold = "mean"
    scale: Literal["linear", "log", "share"] = "linear"
    unit: str = ""
    ports: tuple[str, ...] = ()
    number: str = ""


def _own(name: str) -> Callable[[Columns], Floats]:
    return lambda columns: np.asarray(columns[name], np.float64)


def _nonfinite(columns: Columns) -> Floats:
    return np.asarray(sum(columns[name] for name in NONFINITE), np.float64)


def _rms(columns: Columns) -> Floats:
    finite = columns["numel"] - _nonfinite(columns)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(finite > 0, columns["l2"] / np.sqrt(np.maximum(finite, 1)), np.nan)


def _zeros(columns: Columns) -> Floats:
    with np.errstate(invalid="ignore"):
        return np.where(columns["numel"] > 0, columns["zeros"] / np.maximum(columns["numel"], 1), np.nan)


def _recorded(statistic: Statistic) -> Stat:
    """Return a statistic that is a column of its own."""
    fold: Fold = statistic.merge if statistic.merge in ("min", "max") else "mean"
    name, scale = statistic.name, statistic.scale or "linear"
    columns = statistic.sources or (name,)  # which older runs have too
    return Stat(name, statistic.label, columns, statistic.derive or _own(name), fold, scale, statistic.unit)


_DERIVED: Final = (
    Stat("absmean", "|mean|", ("mean",), lambda columns: np.abs(_own("mean")(columns)), scale="log"),
    Stat("zeros", "zeros (share)", ("zeros", "numel"), _zeros, scale="share", unit="share"),
    Stat("nonfinite", "not finite (count)", NONFINITE, _nonfinite, fold="sum", scale="log", unit="elements"),
    Stat("rms", "root mean square", ("l2", "numel", *NONFINITE), _rms, scale="log"),
    Stat("update", "update ratio ‖Δw‖/‖w‖", (), _own("ratio"), scale="log", unit="‖Δw‖/‖w‖", ports=("update",),
         number="ratio"),
    Stat("grad", "gradient norm", ("l2",), _own("l2"), scale="log", unit="norm", ports=GRADIENT_PORTS),
)  # fmt: skip
_FIRST: Final = ("std", "mean", "absmean", "zeros", "nonfinite")
_ALL: Final = {stat.name: stat for stat in (*(_recorded(s) for s in REGISTRY if s.scale is not None), *_DERIVED)}
STATS: Final = {name: _ALL[name] for name in dict.fromkeys((*_FIRST, *_ALL))}
"""By name, in the order in which the viewer offers them."""


def stat_named(name: str) -> Stat:
    """Return the statistic of a name, or an error that offers those there are."""
    if name not in STATS:
        raise RunError(f"no statistic {name!r}.{suggest(name, STATS)} There are: {', '.join(STATS)}")
    return STATS[name]
