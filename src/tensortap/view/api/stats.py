"""List the statistics a heat map can show: their columns, and how several records become one cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.errors import RunError, suggest
from tensortap.select.ports import GRADIENT_PORTS
from tensortap.types import COUNTS

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[Any]]
NONFINITE: Final = COUNTS[:3]


class Stat(NamedTuple):
    """One statistic. `ports` are those it means something at; none: all. `number` is the reducer's, if it is one."""

    name: str
    columns: tuple[str, ...]
    of: Callable[[Columns], Floats]
    fold: Literal["mean", "sum", "min", "max"] = "mean"
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


STATS: Final = {
    stat.name: stat
    for stat in (
        Stat("std", ("std",), _own("std"), scale="log"),
        Stat("mean", ("mean",), _own("mean")),
        Stat("absmean", ("mean",), lambda columns: np.abs(_own("mean")(columns)), scale="log"),
        Stat("zeros", ("zeros", "numel"), _zeros, scale="share", unit="share"),
        Stat("nonfinite", NONFINITE, _nonfinite, fold="sum", scale="log", unit="elements"),
        Stat("min", ("min",), _own("min"), fold="min"),
        Stat("max", ("max",), _own("max"), fold="max"),
        Stat("l2", ("l2",), _own("l2"), scale="log"),
        Stat("rms", ("l2", "numel", *NONFINITE), _rms, scale="log"),
        Stat("numel", ("numel",), _own("numel"), scale="log", unit="elements"),
        Stat("update", (), _own("ratio"), scale="log", unit="‖Δw‖/‖w‖", ports=("update",), number="ratio"),
        Stat("grad", ("l2",), _own("l2"), scale="log", unit="norm", ports=GRADIENT_PORTS),
    )
}


def stat_named(name: str) -> Stat:
    """Return the statistic of a name, or an error that offers those there are."""
    if name not in STATS:
        raise RunError(f"no statistic {name!r}.{suggest(name, STATS)} There are: {', '.join(STATS)}")
    return STATS[name]
