"""A histogram as TensorBoard draws one: bars without gaps from the smallest value to the largest."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.reduce.histogram import edges
from tensortap.reduce.summary import Summary
from tensortap.sinks.numbers import widened

Floats = npt.NDArray[np.float64]
_FINE: Final = 10  # octaves below the largest value; what is smaller lies within a pixel of zero


class Ladder(NamedTuple):
    """The fields of TensorBoard's histogram: bar `i` reaches from the limit before it to its own."""

    min: float
    max: float
    num: float
    sum: float
    sum_squares: float
    bucket_limit: list[float]
    bucket: list[float]


def ladder(summary: Summary) -> Ladder | None:
    """The finite elements in our own buckets, those next to zero in three; None when there is nothing to draw.

    >>> from tensortap.reduce.summary import summarize
    >>> ladder(summarize([1.0, 1.0, 4.0, float("nan")]))[-2:]
    ([1.125, 4.0, 4.5], [2.0, 0.0, 1.0])
    """
    if summary.hist_counts is None or summary.hist_offset is None or not summary.finite:
        return None
    ends = widened(summary.min, summary.max)
    low, high, count = _bars(summary.hist_offset, summary.hist_counts, summary.zeros, *ends)
    total = float(summary.finite)
    sums = (summary.mean * total, summary.l2 * summary.l2)
    return Ladder(float(low[0]), float(high[-1]), total, *sums, *_rungs(low, high, count))


def _bars(offset: int, run: npt.NDArray[Any], zeros: int, least: float, most: float) -> tuple[Floats, Floats, Floats]:
    """The ends and counts of all bars, from the smallest value to the largest."""
    used = np.flatnonzero(run)
    low, high = edges(offset + used)
    count = run[used].astype(np.float64)
    near = float(np.ldexp(1.0, int(np.frexp(max(abs(least), abs(most)))[1]) - 1 - _FINE))
    small = np.maximum(np.abs(low), np.abs(high)) <= near
    down, up = (count[small & side].sum() for side in (high <= 0, low >= 0))
    low = np.concatenate([low[~small], [-near, -near / 4, near / 4]])
    high = np.concatenate([high[~small], [-near / 4, near / 4, near]])
    count = np.concatenate([count[~small], [down, float(zeros), up]])
    order = np.argsort(low)
    order = order[count[order] > 0]
    low, high = low[order], high[order]
    left, right = np.maximum(low, least), np.minimum(high, most)
    wide = left < right  # else all of the bar's elements are the smallest or the largest, at its very edge
    return np.where(wide, left, low), np.where(wide, right, high), count[order]


def _rungs(low: Floats, high: Floats, count: Floats) -> tuple[list[float], list[float]]:
    """Limits and counts, with an empty bar wherever two bars do not touch."""
    limits: list[float] = []
    counts: list[float] = []
    for left, right, number in zip(low.tolist(), high.tolist(), count.tolist(), strict=True):
        if limits and left > limits[-1]:
            limits.append(left)
            counts.append(0.0)
        limits.append(right)
        counts.append(number)
    return limits, counts
