"""Compute one statistic of one place over steps from its records."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.errors import RunError, suggest
from tensortap.reduce.histogram import quantile
from tensortap.reduce.statistics import COLUMNS, NONFINITE, NUMBERS
from tensortap.store.merging import fold

_DERIVED: Final = ("nonfinite",)


class Series(NamedTuple):
    """One statistic over steps."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[Any]


def columns_for(stat: str) -> list[str]:
    """Return the columns that a statistic is made of."""
    if stat in NUMBERS or stat in _DERIVED:
        return list(NUMBERS)
    if _quantile_of(stat) is not None:
        return [*NUMBERS, "hist_offset", "hist_counts"]
    return [stat] if stat in COLUMNS else ["numbers"]


def series_of(rows: Any, stat: str) -> Series:
    """Return a statistic of rows sorted by step; calls and ranks of one step are folded where that means something."""
    if stat in NUMBERS or stat in _DERIVED or _quantile_of(stat) is not None:
        folded = fold(rows, ("ranks", "calls"))
        return Series(folded["step"].to_numpy(), _values(folded, stat))
    steps = rows["step"].to_numpy()
    if stat in COLUMNS:
        return Series(steps, rows[stat].to_numpy(zero_copy_only=False))
    return Series(steps, _own_numbers(rows, stat))


def _values(rows: Any, stat: str) -> npt.NDArray[Any]:
    q = _quantile_of(stat)
    if q is not None:
        return np.array([_row_quantile(row, q) for row in rows.to_pylist()], np.float64)
    if stat == "nonfinite":
        return np.add.reduce([rows[name].to_numpy() for name in NONFINITE], axis=0)  # type: ignore[no-any-return]
    plain: npt.NDArray[Any] = rows[stat].to_numpy(zero_copy_only=False)
    return plain


def _row_quantile(row: dict[str, Any], q: float) -> float:
    if row["hist_counts"] is None or row["min"] is None:
        return float("nan")
    counts = np.array(row["hist_counts"], np.int64)
    return float(quantile(q, row["hist_offset"], counts, row["zeros"], minimum=row["min"], maximum=row["max"]))


def _quantile_of(stat: str) -> float | None:
    try:
        q = float(stat[1:]) if stat.startswith("q") else -1.0
    except ValueError:
        return None
    return q if 0 <= q <= 1 else None


def _own_numbers(rows: Any, stat: str) -> npt.NDArray[np.float64]:
    """Return what a function of the user's gave."""
    numbers = [dict(pairs or ()) for pairs in rows["numbers"].to_pylist()]
    known = sorted({name for pairs in numbers for name in pairs})
    if stat not in known:
        options = [*known, *NUMBERS, *_DERIVED, "q0.95"]
        raise RunError(f"no statistic {stat!r}.{suggest(stat, options)} There are: {', '.join(options)}")
    return np.array([pairs.get(stat, np.nan) for pairs in numbers], np.float64)
