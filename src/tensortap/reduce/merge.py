"""Folding many rows into one: counts add, moments combine as if the elements had been seen together.

All groups are folded at once. With every row's mean and std known, the mean of a group and then the deviations
from it are taken in two passes, which is Chan's formula without its order of merging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.reduce import kernel
from tensortap.reduce.histogram import BUCKETS
from tensortap.reduce.statistics import NUMBERS, REGISTRY
from tensortap.reduce.summary import Summary

Columns = Mapping[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_GROUPS_AT_ONCE = 2048
_TOGETHER: Final[Mapping[str, np.ufunc]] = {"sum": np.add, "min": np.fmin, "max": np.fmax}


def merge_groups(columns: Columns, starts: Ints) -> dict[str, npt.NDArray[Any]]:
    """Fold rows, sorted by group, into one row a group; `starts` are the groups' first rows.

    >>> merged = merge_groups(
    ...     {"numel": np.array([1, 3]), "nan": np.array([0, 0]), "posinf": np.array([0, 0]), "neginf": np.array([0, 0]),
    ...      "zeros": np.array([0, 1]), "min": np.array([4.0, 0.0]), "max": np.array([4.0, 4.0]),
    ...      "mean": np.array([4.0, 2.0]), "std": np.array([0.0, 1.0]), "l1": np.array([4.0, 6.0]),
    ...      "l2": np.array([4.0, 5.0]), "absmax": np.array([4.0, 4.0]), "skewness": np.array([np.nan, 0.0]),
    ...      "kurtosis": np.array([np.nan, 1.5])}, np.array([0]))
    >>> int(merged["numel"][0]), float(merged["mean"][0]), float(merged["l1"][0])
    (4, 2.5, 10.0)
    """
    with np.errstate(over="ignore"):
        merged: dict[str, npt.NDArray[Any]] = {
            s.name: _TOGETHER[s.merge].reduceat(columns[s.name], starts) for s in REGISTRY if s.merge in _TOGETHER
        }
    finite = (columns["numel"] - columns["nan"] - columns["posinf"] - columns["neginf"]).astype(np.float64)
    count = np.add.reduceat(finite, starts)
    sizes = np.diff(np.append(starts, len(finite)))
    scale = _scale(columns, starts)
    wide = np.repeat(scale, sizes)
    mean, std = (np.where(finite > 0, columns[name], 0.0) * wide for name in ("mean", "std"))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        center = np.add.reduceat(finite * mean, starts) / count
        away = mean - np.repeat(np.nan_to_num(center), sizes)
        square = np.add.reduceat(finite * (std * std + away * away), starts)
        third, fourth = _powers(columns, std, away)
        variance = np.where(square > 0, square / count, np.nan)
        merged["skewness"] = np.add.reduceat(finite * third, starts) / square / np.sqrt(variance)
        merged["kurtosis"] = np.add.reduceat(finite * fourth, starts) / square / variance
        merged["mean"] = np.clip(center / scale, merged["min"], merged["max"])
        merged["std"] = np.sqrt(square / count) / scale
        merged["l2"] = np.sqrt(np.add.reduceat((columns["l2"] * wide) ** 2, starts)) / scale
    return merged


def merge_summaries(some: Sequence[Summary]) -> Summary:
    """Return the statistics of several tensors together; shape and type are those of the largest, a hash is left out.

    >>> from tensortap.reduce.summary import summarize
    >>> together = merge_summaries([summarize([1.0, 2.0]), summarize([3.0, float("nan")])])
    >>> together.numel, together.nan, together.mean, together.quantile(1.0)
    (4, 1, 2.0, 3.0)
    """
    if len(some) == 1:
        return some[0]
    start = np.zeros(1, np.int64)
    columns = {name: np.array([getattr(one, name) for one in some]) for name in NUMBERS}
    values = {name: column[0].item() for name, column in merge_groups(columns, start).items()}
    counts = [one.hist_counts for one in some if one.hist_counts is not None]
    offset: int | None = None
    merged: Ints | None = None
    if len(counts) == len(some):
        offsets = np.array([one.hist_offset for one in some], np.int64)
        ends = np.cumsum([0, *map(len, counts)])
        [(offset, merged)] = merge_histograms(offsets, ends, np.concatenate(counts).astype(np.int64), start)
    largest = max(some, key=lambda one: one.numel)
    return Summary(dtype=largest.dtype, shape=largest.shape, hist_offset=offset, hist_counts=merged, **values)


def _powers(columns: Columns, std: Floats, away: Floats) -> tuple[Floats, Floats]:
    """Return each row's third and fourth powers of deviations from its group's mean, on average."""
    skewness, kurtosis = (np.where(std > 0, columns[name], 0.0) for name in ("skewness", "kurtosis"))
    cube, square = skewness * std**3, std * std
    third = cube + 3 * away * square + away**3
    return third, kurtosis * square * square + 4 * away * cube + 6 * away * away * square + away**4


def _scale(columns: Columns, starts: Ints) -> npt.NDArray[np.float64]:
    """Return, for each group, a power of two that keeps fourth powers of its largest value in range."""
    largest = np.fmax(np.nan_to_num(np.abs(columns["mean"])), np.nan_to_num(columns["std"]))
    top = np.fmax.reduceat(np.fmax(largest, np.nan_to_num(columns["l2"])), starts)
    extreme = (top > 2.0**200) | ((top < 2.0**-200) & (top > 0))
    return np.where(extreme, np.exp2(-np.clip(np.frexp(top)[1], -1000, 1000).astype(np.float64)), 1.0)


def merge_histograms(offsets: Ints, ends: Ints, counts: Ints, starts: Ints) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Fold rows' histograms into one a group: exact, whatever the order. `ends` are Arrow's list offsets."""
    lengths = np.diff(ends)
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(offsets))))
    bucket = np.repeat(offsets - ends[:-1], lengths) + np.arange(ends[0], ends[-1])
    owner = np.repeat(group, lengths)
    merged: list[tuple[int, npt.NDArray[np.int64]]] = []
    for low in range(0, len(starts), _GROUPS_AT_ONCE):
        high = min(low + _GROUPS_AT_ONCE, len(starts))
        first, last = np.searchsorted(owner, [low, high])
        flat = (owner[first:last] - low) * BUCKETS + bucket[first:last]
        dense = np.bincount(flat, counts[ends[0] :][first:last], (high - low) * BUCKETS).astype(np.int64)
        merged.extend(_trim(row) for row in dense.reshape(high - low, BUCKETS))
    return merged


def add_slices(dense: Ints, group: Ints, first: Ints, ends: Ints, counts: Ints) -> None:
    """Add rows' counts to the histograms of their groups, in place; a row whose group is −1 is left out.

    >>> dense = np.zeros((2, 4), np.int64)
    >>> add_slices(dense, np.array([1, -1, 1]), np.array([0, 1, 2]), np.array([0, 2, 3, 5]), np.array([7, 8, 9, 1, 2]))
    >>> dense.tolist()
    [[0, 0, 0, 0], [7, 8, 1, 2]]
    """
    if kernel.add_histograms is not None:
        arrays = [np.ascontiguousarray(values, np.int64) for values in (group, first, ends, counts)]
        at = [values.ctypes.data for values in arrays]
        kernel.add_histograms(dense.ctypes.data, *dense.shape, *at[:3], len(group), at[3], len(counts))
        return
    lengths = np.where(group >= 0, np.diff(ends), 0)
    begins = np.cumsum(lengths) - lengths
    chosen = counts[ends[0] : ends[-1]][np.repeat(group >= 0, np.diff(ends))]
    at_bucket = np.repeat(group * dense.shape[1] + first - begins, lengths) + np.arange(len(chosen))
    np.add.at(dense.reshape(-1), at_bucket, chosen)


def _trim(dense: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int64]]:
    used = np.flatnonzero(dense)
    return (int(used[0]), dense[used[0] : used[-1] + 1].copy()) if len(used) else (0, dense[:0].copy())
