"""Measure how far apart two arrays, two sets of statistics and two histograms are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.diff.tolerance import Tolerance
from tensortap.reduce.histogram import BUCKETS
from tensortap.reduce.statistics import NONFINITE, REGISTRY
from tensortap.reduce.summary import Summary

Array = npt.NDArray[Any]
_AT_ONCE: Final = 1 << 20
_EXTREME: Final = 2.0**400
_ORDER: Final = ("moment", "sum", "norm", "extreme")
COMPARED: Final = [(s.name, bound) for bound in _ORDER for s in REGISTRY if s.bound == bound]


class ElementDifference(NamedTuple):
    """Two arrays compared element by element. All but the last three are over elements that are finite in both."""

    max_abs: float
    max_rel: float
    nl2: float
    cosine: float
    sqnr: float
    bit_equal: float
    misplaced: int  # NaN or infinite in one where the other is something else
    error: float
    excess: float


class LargestDifference(NamedTuple):
    """The largest difference: relative to its scale, in multiples of the tolerance, and the name of the statistic."""

    error: float
    excess: float
    of: str


def elements(a: Array, b: Array, tolerance: Tolerance, rms: float | None = None) -> ElementDifference:
    """Compare arrays of one size; `a` is the reference, `rms` that of the whole tensor when `a` is a part of it.

    >>> found = elements(np.array([3.0, 4.0]), np.array([3.0, 4.5]), Tolerance(0.1, 0.0))
    >>> found.max_abs, found.nl2, found.bit_equal
    (0.5, 0.1, 0.5)
    """
    a, b = a.reshape(-1), b.reshape(-1)
    factor = _factor(a, b)
    known_rms = _rms(a, factor) if rms is None else rms
    squares = np.zeros(4)  # of a, of b, of their product, of their difference
    max_abs = max_rel = error = excess = 0.0
    equal = misplaced = 0
    for x, y, same in _chunks(a, b):
        equal += int(np.count_nonzero(same))
        finite = np.isfinite(x) & np.isfinite(y)
        misplaced += int(np.count_nonzero(~finite & ~_alike(x, y)))
        x, y = x[finite], y[finite]
        if not x.size:
            continue
        if same.all():
            squares[:3] += _dot(x * factor, x * factor)
            continue
        apart, size = np.abs(x - y), np.abs(x)
        max_abs = max(max_abs, float(apart.max()))
        max_rel = max(max_rel, _largest(apart, np.maximum(size, np.abs(y))))
        error = max(error, _largest(apart, size + known_rms))
        excess = max(excess, _largest(apart, tolerance.atol + tolerance.rtol * (size + known_rms)))
        x, y = x * factor, y * factor
        squares += [_dot(x, x), _dot(y, y), _dot(x, y), _dot(x - y, x - y)]
    if misplaced or (_exact(a, b) and equal < a.size):
        error, excess = (math.inf if misplaced else error), math.inf
    nl2 = _ratio(math.sqrt(squares[3]), math.sqrt(squares[0]))
    return ElementDifference(
        max_abs=max_abs,
        max_rel=max_rel,
        nl2=nl2,
        cosine=_cosine(*squares[:3].tolist()),
        sqnr=-20 * math.log10(nl2) if 0 < nl2 < math.inf else (-math.inf if nl2 else math.inf),
        bit_equal=equal / a.size if a.size else 1.0,
        misplaced=misplaced,
        error=error,
        excess=excess,
    )


class ScaledDifference(NamedTuple):
    """A statistic, its difference, and the scale on which an element's tolerance bounds it."""

    of: str
    apart: float
    scale: float


def statistics(
    a: Summary, b: Summary, differences: Iterable[ScaledDifference], tolerance: Tolerance
) -> LargestDifference:
    """Compare statistics so that tensors whose elements are all within the tolerance are within it here too."""
    for name in NONFINITE:
        if getattr(a, name) != getattr(b, name):
            return LargestDifference(math.inf, math.inf, "nan" if name == "nan" else "inf")
    worst = LargestDifference(0.0, 0.0, "")
    for of, apart, scale in differences:
        excess = _ratio(apart, tolerance.allowed(scale))
        if excess > worst.excess or not worst.of:
            worst = LargestDifference(_ratio(apart, scale), excess, of)
    return worst


def relative(differences: Iterable[ScaledDifference]) -> dict[str, float]:
    """Return the differences of statistics, each relative to its scale."""
    return {of: _ratio(apart, scale) for of, apart, scale in differences}


def scaled_differences(a: Summary, b: Summary) -> list[ScaledDifference]:
    """Return the difference of each statistic that is finite in both."""
    rms, count = rms_of(a), max(a.finite, 1)
    divisors = {"sum": count, "norm": math.sqrt(count)}
    found = []
    for name, bound in COMPARED:
        divisor = divisors.get(bound, 1)
        x, y = getattr(a, name) / divisor, getattr(b, name) / divisor
        if math.isfinite(x) and math.isfinite(y):
            found.append(ScaledDifference(name, abs(x - y), rms + (abs(x) if bound == "extreme" else rms)))
    return found


def rms_of(summary: Summary) -> float:
    """Return the root mean square of the finite elements."""
    return float(summary.l2 / math.sqrt(summary.finite)) if summary.finite > 0 else 0.0  # negative in a damaged file


class Distance(NamedTuple):
    """Between histograms: the share of elements that would have to move (total variation), and Kolmogorov–Smirnov."""

    tv: float
    ks: float


def histograms(a: Summary, b: Summary) -> Distance | None:
    """Return the distance of two distributions from their buckets; None when a histogram is missing or empty."""
    if a.hist_counts is None or b.hist_counts is None or not a.numel or not b.numel:
        return None
    first = min(a.hist_offset or 0, b.hist_offset or 0)
    last = max((s.hist_offset or 0) + len(s.hist_counts) for s in (a, b) if s.hist_counts is not None)
    if first < 0 or last > BUCKETS:  # only a damaged file names other buckets
        return None
    difference = _shares(a, first, last) - _shares(b, first, last)
    return Distance(float(np.abs(difference).sum() / 2), float(np.abs(np.cumsum(difference)).max()))


def _shares(summary: Summary, first: int, last: int) -> npt.NDArray[np.float64]:
    """Return shares of all elements from −inf to inf, then NaN. In buckets positive and negative values alternate."""
    first -= first & 1
    counts = np.zeros(last - first + (last - first) % 2)
    assert summary.hist_counts is not None and summary.hist_offset is not None
    start = summary.hist_offset - first
    counts[start : start + len(summary.hist_counts)] = summary.hist_counts
    ends = (np.array([summary.neginf]), np.array([summary.zeros]), np.array([summary.posinf, summary.nan]))
    return np.concatenate([ends[0], counts[1::2][::-1], ends[1], counts[::2], ends[2]]) / summary.numel


# Element by element


def _chunks(a: Array, b: Array) -> Iterator[tuple[Array, Array, npt.NDArray[np.bool_]]]:
    """Yield parts of both in double precision, and which of their elements have the same bits (or value)."""
    bits = _bits(a, b)
    for start in range(0, a.size, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        x, y = _double(a[part]), _double(b[part])
        yield x, y, _alike(x, y) if bits is None else (bits[0][part] == bits[1][part]).all(axis=1)


def _alike(x: Array, y: Array) -> npt.NDArray[np.bool_]:
    """Return where two arrays are equal, NaN to NaN."""
    return np.asarray((x == y) | (np.isnan(x) & np.isnan(y)))


def _bits(a: Array, b: Array) -> tuple[Array, Array] | None:
    """Return both as rows of integers; None for arrays of different types, which are held to their values."""
    if a.dtype != b.dtype:
        return None
    width = min(a.dtype.itemsize, 8)
    views = (np.ascontiguousarray(x).view(f"u{width}").reshape(x.size, x.itemsize // width) for x in (a, b))
    return next(views), next(views)


def _double(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _exact(a: Array, b: Array) -> bool:
    """Return whether both are integers or booleans of one type, which are compared exactly."""
    return a.dtype == b.dtype and a.dtype.kind in "iub"


def _factor(a: Array, b: Array) -> float:
    """Return a power of two that keeps squares of double precision from overflowing or vanishing."""
    if not any(x.dtype.itemsize >= 8 and x.dtype.kind in "fc" for x in (a, b)):
        return 1.0
    top = 0.0
    for x in (a, b):
        size = np.abs(_double(x))
        top = max(top, float(np.max(size, where=np.isfinite(size), initial=0.0)))
    return (
        1.0 if not top or 1 / _EXTREME < top < _EXTREME else math.ldexp(1.0, -max(-1000, min(1000, math.frexp(top)[1])))
    )


def _rms(a: Array, factor: float) -> float:
    squares, count = 0.0, 0
    for start in range(0, a.size, _AT_ONCE):
        x = _double(a[start : start + _AT_ONCE])
        x = x[np.isfinite(x)] * factor
        squares, count = squares + _dot(x, x), count + x.size
    return math.sqrt(squares / count) / factor if count else 0.0


def _dot(x: Array, y: Array) -> float:
    return float(np.einsum("i,i->", x.conj(), y).real)  # no BLAS: its threads get in each other's way on a busy machine


def _largest(apart: Array, scale: Array) -> float:
    """Return the largest quotient; nothing apart is 0 whatever the scale."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return float(np.where(apart == 0, 0.0, apart / scale).max())


def _ratio(part: float, whole: float) -> float:
    if not part:
        return 0.0
    return part / whole if whole else math.inf


def _cosine(aa: float, bb: float, ab: float) -> float:
    if not aa or not bb:
        return 1.0 if aa == bb else 0.0
    return max(-1.0, min(1.0, ab / (math.sqrt(aa) * math.sqrt(bb))))
