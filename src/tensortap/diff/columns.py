"""Compare paired rows as arrays: the same numbers as records.py gives for one pair, for a chunk of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.diff.metrics import COMPARED
from tensortap.diff.row_pairs import Array, RowPairs
from tensortap.diff.tolerance import Precision
from tensortap.reduce.statistics import NONFINITE
from tensortap.store.arrays import Ints, array_of
from tensortap.types import DTYPES

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
COLUMNS: Final = ("dtype", "numel", *NONFINITE, "hash", *(name for name, _ in COMPARED))
_EXACT: Final = np.array([*(d.name.startswith(("int", "uint", "bool")) for d in DTYPES), False])


class ChunkDifference(NamedTuple):
    """The difference of each pair of a chunk, and whether it differs in any of the values read so far."""

    error: Floats
    excess: Floats
    unequal: Bools


class RoundingSoFar:
    """Give the relative tolerance of pairs as arrays, as `Precision` gives it one by one in order of execution.

    Earlier rounding is known from the first place of each tolerance: add pairs in order of execution.
    """

    def __init__(self, precision: Precision, is_parameter: Sequence[bool]) -> None:
        names = [*(d.name for d in DTYPES), ""]  # the last is for unknown types
        self._own = np.array([[precision.own(a, b) for b in names] for a in names])
        self._rtol, self.atol = precision.given
        self._is_parameter = np.array(is_parameter, bool)
        self._first: dict[float, tuple[int, int]] = {}  # position and rank by tolerance

    def add(self, pairs: RowPairs) -> None:
        """Note where each tolerance is seen first."""
        if self._rtol is not None or not len(pairs):
            return
        own = self._of_types(pairs)
        for level in np.unique(own).tolist() if np.ptp(own) else [float(own[0])]:
            here = (int(pairs.position[own == level].min()), pairs.rank)
            self._first[level] = min(here, self._first.get(level, here))

    def rtol(self, pairs: RowPairs, shift: int = 0) -> Floats:
        """Return the relative tolerance of each pair; `shift` is added to the numbers of the pairs' steps."""
        own = self._of_types(pairs)
        if self._rtol is not None:
            return np.full(len(own), self._rtol)
        if len(self._first) == 1:  # all pairs have one tolerance, their own
            return own
        so_far, position = np.zeros(len(own)), pairs.position + (shift << 32)
        for level, (first, rank) in self._first.items():
            if level:
                later = position >= first if pairs.rank > rank else position > first
                in_earlier_step = position >> 32 > first >> 32
                seen = np.where(self._is_parameter[pairs.a.site], in_earlier_step, later)
                np.maximum(so_far, level, out=so_far, where=seen)
        return np.where(own > 0, np.maximum(own, so_far), 0.0)

    def _of_types(self, pairs: RowPairs) -> Floats:
        return self._own[pairs.a.columns["dtype"], pairs.b.columns["dtype"]]


def differences(pairs: RowPairs, rtol: Floats, atol: float) -> ChunkDifference:
    """Return how far the statistics of each pair differ, as `metrics.statistics` does."""
    a, b = pairs.a.columns, pairs.b.columns
    with np.errstate(all="ignore"):
        error, excess = _statistics(a, b, rtol, atol)
    impossible = a["numel"] != b["numel"]
    for name in NONFINITE:
        impossible |= a[name] != b[name]
    error[impossible] = excess[impossible] = np.inf
    hashed = a["hashed"] & b["hashed"]
    other = hashed & (a["hash"] != b["hash"])
    excess[other & (a["dtype"] == b["dtype"]) & _EXACT[a["dtype"]]] = np.inf
    return ChunkDifference(error, excess, (error != 0) | (excess != 0) | other)


def _statistics(a: dict[str, Array], b: dict[str, Array], rtol: Floats, atol: float) -> tuple[Floats, Floats]:
    """Return the largest difference of each pair: relative to its scale, and in multiples of the tolerance."""
    error, excess = _by_scale(a, b, rtol, atol)
    odd = np.flatnonzero(~(np.isfinite(error + excess) & (a["l2"] >= 0)))
    if len(odd):  # nothing but zeros, no finite element, no tolerance; a negative norm is damage
        x, y = ({name: column[odd] for name, column in side.items()} for side in (a, b))
        error[odd], excess[odd] = _one_by_one(x, y, rtol[odd], atol)
    return error, excess


def _by_scale(a: dict[str, Array], b: dict[str, Array], rtol: Floats, atol: float) -> tuple[Floats, Floats]:
    """Return the same where all quotients are finite: of statistics of one scale the largest difference counts."""
    rms, per_element = _scales(a)
    apart = np.zeros(len(rms))
    for name, bound in COMPARED:
        if bound != "extreme":
            x, y = (side[name] / per_element[bound] if bound in per_element else side[name] for side in (a, b))
            apart = np.maximum(apart, np.abs(x - y))
    scale = rms + rms
    error, excess = apart / scale, apart / (atol + rtol * scale)
    for name in (name for name, bound in COMPARED if bound == "extreme"):
        apart, scale = np.abs(a[name] - b[name]), rms + np.abs(a[name])
        found = apart / (atol + rtol * scale)
        error = np.where(found > excess, apart / scale, error)
        excess = np.maximum(excess, found)
    return error, excess


def _one_by_one(a: dict[str, Array], b: dict[str, Array], rtol: Floats, atol: float) -> tuple[Floats, Floats]:
    """Return the same, whatever the values are, one statistic after the other."""
    rms, per_element = _scales(a)
    error, excess, known = np.zeros(len(rms)), np.zeros(len(rms)), np.zeros(len(rms), bool)
    for name, bound in COMPARED:
        x, y = a[name], b[name]
        if bound in per_element:
            x, y = x / per_element[bound], y / per_element[bound]
        apart = np.abs(x - y)
        scale = rms + (np.abs(x) if bound == "extreme" else rms)
        found = _ratio(apart, atol + rtol * scale)
        larger = np.isfinite(x) & np.isfinite(y) & ((found > excess) | ~known)
        known |= larger
        excess = np.where(larger, found, excess)
        error = np.where(larger, _ratio(apart, scale), error)
    return error, excess


def _scales(a: dict[str, Array]) -> tuple[Floats, dict[str, Floats]]:
    """Return the root mean square of the finite elements, and what sums and norms are divided by."""
    finite = a["numel"] - a["nan"] - a["posinf"] - a["neginf"]
    count = np.maximum(finite, 1).astype(np.float64)
    per_element = {"sum": count, "norm": np.sqrt(count)}
    return np.where(finite > 0, a["l2"] / per_element["norm"], 0.0), per_element


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.where(part == 0, 0.0, part / whole)  # 0/0 is the only quotient that would be another


def rows_that_differ(a: Any, b: Any) -> Bools:
    """Return which of two columns of lists have other elements; where one has no list, nothing is known to differ."""
    valid = array_of(a.is_valid()) & array_of(b.is_valid())
    (first, x), (second, y) = _flat(a), _flat(b)
    differ = np.diff(first) != np.diff(second)
    if differ.any():
        same = ~differ & valid
        differ[same] = rows_that_differ(a.filter(pa.array(same)), b.filter(pa.array(same)))
    else:
        differ[np.unique(np.searchsorted(first, np.flatnonzero(x != y), "right") - 1)] = True
    return np.asarray(differ & valid)


def histograms_that_differ(offset_a: Ints, a: Any, offset_b: Ints, b: Any) -> Bools:
    """Return which histograms differ; empty buckets at the ends of one do not count."""
    valid = array_of(a.is_valid()) & array_of(b.is_valid())
    differ: Bools = (rows_that_differ(a, b) | (offset_a != offset_b)) & valid
    if differ.any():
        rows = pa.array(differ)
        first, x = _trimmed(offset_a[differ], a.filter(rows))
        second, y = _trimmed(offset_b[differ], b.filter(rows))
        differ[differ] = (first != second) | rows_that_differ(x, y)
    return differ


def _trimmed(offset: Ints, counts: Any) -> tuple[Ints, Any]:
    """Return histograms without the empty buckets at their ends; one without any count begins at 0."""
    starts, values = _flat(counts)
    used = np.flatnonzero(values)
    row = np.searchsorted(starts, used, "right") - 1
    first, last = starts[:-1].copy(), starts[:-1].copy()
    first[row[::-1]] = used[::-1]  # of several the last one written counts: the first used bucket
    last[row] = used + 1
    at, lengths = np.arange(len(values)), np.diff(starts)
    keep = (np.repeat(first, lengths) <= at) & (at < np.repeat(last, lengths))
    ends = np.cumsum([0, *(last - first)]).astype(np.int32)
    offset = np.where(last > first, offset + first - starts[:-1], 0)
    return offset, pa.ListArray.from_arrays(pa.array(ends), pa.array(values[keep]))


def _flat(lists: Any) -> tuple[Ints, Array]:
    """Return the first element of each list, and all elements."""
    lists = lists.fill_null([]) if lists.null_count else lists
    offsets = array_of(lists.offsets).astype(np.int64)
    return offsets - offsets[0] if len(offsets) else np.zeros(1, np.int64), array_of(lists.flatten())
