"""The mathematics of the float-bit histogram: the range of each bucket, and quantities derived from the counts.

A finite value other than zero belongs to bucket `j = 2 * k + negative`, where `k` is the exponent and the first three
mantissa bits of its magnitude as a float32 (cut, not rounded). Buckets of positive and negative values alternate, so
the buckets in use lie close together and are kept as one dense run: `offset`, the first of them, and `counts`.
Zeros, infinities and NaN have counts of their own. Below 2^-126 the buckets are equally wide (2^-129); the bucket of
the largest magnitudes also holds what lies beyond the range of float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]

BUCKETS: Final = 4080
RELATIVE_ERROR: Final = 1 / 8
"""How far a quantile can be from the element it stands for, relative to it, for magnitudes 2^-126 to 2^128."""
ABSOLUTE_ERROR: Final = 2.0**-129
"""The same in absolute terms for smaller magnitudes, where the buckets are equally wide."""


def edges(j: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Return the ends of buckets `j`, as signed values; the bucket of the largest magnitudes has no outer end.

    >>> edges([2 * 1016, 2 * 1016 + 1])  # 1016 == 127 * 8: an exponent of zero
    (array([ 1.   , -1.125]), array([ 1.125, -1.   ]))
    """
    j = np.asarray(j, np.int64)
    bits = (j >> 1) << 20
    near = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    far = (bits + (1 << 20)).astype(np.uint32).view(np.float32).astype(np.float64)
    negative = (j & 1).astype(bool)
    return np.where(negative, -far, near), np.where(negative, -near, far)


def dense(offset: int, counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return all buckets, the empty ones too.

    >>> dense(2032, [3, 1])[2030:2036]
    array([0, 0, 3, 1, 0, 0])
    """
    out = np.zeros(BUCKETS, np.int64)
    run = np.asarray(counts, np.int64)
    out[offset : offset + run.size] = run
    return out


def merge(histograms: Iterable[tuple[int, npt.ArrayLike]]) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the histogram of all elements of several histograms together.

    >>> merge([(10, [1, 2]), (13, [5]), (0, [])])
    (10, array([1, 2, 0, 5]))
    """
    total = np.zeros(BUCKETS, np.int64)
    for offset, counts in histograms:
        run = np.asarray(counts, np.int64)
        total[offset : offset + run.size] += run
    used = np.flatnonzero(total)
    return (int(used[0]), total[used[0] : used[-1] + 1]) if used.size else (0, total[:0])


def _ascending(
    offset: int, counts: npt.ArrayLike, zeros: int, minimum: float, maximum: float
) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Return the ends and counts of the non-empty buckets from smallest to largest value, zeros among them."""
    run = np.asarray(counts, np.int64)
    used = np.flatnonzero(run)
    low, high = edges(offset + used)
    low, high, number = np.append(low, 0.0), np.append(high, 0.0), np.append(run[used], zeros)
    order = np.lexsort((high, low))
    order = order[number[order] > 0]
    return np.clip(low[order], minimum, maximum), np.clip(high[order], minimum, maximum), number[order]


@overload
def quantile(
    q: float, offset: int, counts: npt.ArrayLike, zeros: int = 0, *, minimum: float, maximum: float
) -> float: ...
@overload
def quantile(
    q: npt.NDArray[Any] | list[float],
    offset: int,
    counts: npt.ArrayLike,
    zeros: int = 0,
    *,
    minimum: float,
    maximum: float,
) -> Floats: ...
def quantile(
    q: float | npt.NDArray[Any] | list[float],
    offset: int,
    counts: npt.ArrayLike,
    zeros: int = 0,
    *,
    minimum: float,
    maximum: float,
) -> float | Floats:
    """Return the values below which shares `q` of the finite elements lie, zeros included; NaN when there are none.

    >>> quantile(0.5, 2032, [0, 0, 8], minimum=1.125, maximum=1.25)  # eight values in [1.125, 1.25)
    1.1796875

    Exact at 0 and 1. Between them it stands for the element of rank `ceil(q * n)` (NumPy's `inverted_cdf`) and lies
    in the bucket of that element, at the place its rank has there. A bucket is an eighth as wide as its values are
    large, so the error is less than `RELATIVE_ERROR` of the element for magnitudes of 2^-126 to 2^128, and less than
    `ABSOLUTE_ERROR` below; zeros are exact.
    """
    share = np.asarray(q, np.float64)
    if not np.all((share >= 0) & (share <= 1)):
        raise ValueError(f"quantiles must be between 0 and 1, got {q}")
    low, high, number = _ascending(offset, counts, zeros, minimum, maximum)
    ends = np.cumsum(number)
    if not ends.size:
        out = np.full(share.shape, np.nan)
    else:
        rank = np.maximum(np.ceil(share * ends[-1]), 1)
        at = np.searchsorted(ends, rank)
        place = (rank - (ends[at] - number[at]) - 0.5) / number[at]
        out = np.clip(low[at] * (1 - place) + high[at] * place, minimum, maximum)
        out = np.where(share == 0, minimum, np.where(share == 1, maximum, out))
    return out if share.ndim else float(out)


def rebin(offset: int, counts: npt.ArrayLike, zeros: int, minimum: float, maximum: float, bins: int) -> Floats:
    """Return counts in `bins` equal steps from `minimum` to `maximum`, for drawing on a linear axis.

    >>> rebin(2032, [4, 0, 4], 0, 1.0, 1.25, 4)
    array([2., 2., 2., 2.])

    A bucket that reaches over several bins is shared out evenly; the sum is the number of finite elements.
    """
    out = np.zeros(bins)
    low, high, number = _ascending(offset, counts, zeros, minimum, maximum)
    if not number.size:
        return out
    # Scaled by a power of two: the difference of the ends may be more than float64 holds, or next to nothing.
    power = 1 + int(np.frexp(max(abs(minimum), abs(maximum)))[1])
    first, last = np.ldexp([minimum, maximum], -power)
    scale = bins / (last - first) if last > first else 0.0
    start, stop = (np.clip((np.ldexp(ends, -power) - first) * scale, 0, bins) for ends in (low, high))
    narrow = stop - start <= 1e-9
    np.add.at(out, np.minimum(start[narrow].astype(np.int64), bins - 1), number[narrow])
    for a, b, n in zip(start[~narrow], stop[~narrow], number[~narrow], strict=True):
        inside = np.minimum(b, np.arange(1, bins + 1)) - np.maximum(a, np.arange(bins))
        out += n * np.maximum(inside, 0) / (b - a)
    return out


def magnitude_share(offset: int, counts: npt.ArrayLike, low: float, high: float) -> float:
    """Return the share of the values in buckets (finite, not zero) whose magnitude is in [low, high).

    >>> magnitude_share(2032, [4, 4, 8], 0.0, 1.125)
    0.5

    A bucket cut by a limit counts in proportion, so limits that are powers of two are exact.
    """
    run = np.asarray(counts, np.float64)
    near, far = edges((offset + np.arange(run.size)) & ~1)
    far = np.minimum(far, 2.0**128)
    inside = np.clip(np.minimum(far, high) - np.maximum(near, low), 0, None) / (far - near)
    total = run.sum()
    return float((run * inside).sum() / total) if total else 0.0
