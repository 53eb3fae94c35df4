"""Running statistics of every site, by dimension and in all, gathered while rows are written.

Blocks are added in the order in which they are written, and parts in the order of their numbers, so that the
numbers are the same to the last bit however often a harvest was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.harvest.rows import Array
from tensortap.reduce import histogram
from tensortap.reduce.columns import column_statistics
from tensortap.reduce.summary import summarize

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
_COUNTS: Final = ("finite", "nonfinite", "zero", "positive")
_MOMENTS: Final = ("mean", "squares", "min", "max")
_GLOBAL: Final = "histogram"


@dataclass(slots=True)
class SiteStatistics:
    """Count, mean, variance, minimum and maximum of every dimension, and the histogram of all elements."""

    rows: int
    finite: Counts
    nonfinite: Counts
    zero: Counts
    positive: Counts
    mean: Floats
    squares: Floats  # the sum of squared deviations from the mean
    min: Floats
    max: Floats
    histogram: Counts

    @classmethod
    def empty(cls, width: int) -> SiteStatistics:
        """Return the statistics of no rows."""
        finite, nonfinite, zero, positive = np.zeros((4, width), np.int64)
        low, high = np.full(width, np.inf), np.full(width, -np.inf)
        buckets = np.zeros(histogram.BUCKETS, np.int64)
        return cls(
            0, finite=finite, nonfinite=nonfinite, zero=zero, positive=positive, mean=np.zeros(width),
            squares=np.zeros(width), min=low, max=high, histogram=buckets,
        )  # fmt: skip

    @classmethod
    def of(cls, block: Array) -> SiteStatistics:
        """Return the statistics of a block of rows."""
        found, summary = column_statistics(block), summarize(np.ascontiguousarray(block))
        counts = () if summary.hist_counts is None else summary.hist_counts
        return cls(
            len(block), finite=found.finite, nonfinite=len(block) - found.finite, zero=found.zero,
            positive=found.positive, mean=found.mean, squares=found.squares, min=found.min, max=found.max,
            histogram=histogram.dense(summary.hist_offset or 0, counts),
        )  # fmt: skip

    def add(self, other: SiteStatistics) -> None:
        """Add the rows of another block or part, by Chan's formula."""
        total = self.finite + other.finite
        safe = np.maximum(total, 1)
        away = other.mean - self.mean
        self.squares += other.squares + away**2 * (self.finite * (other.finite / safe))
        self.mean += away * (other.finite / safe)
        self.rows += other.rows
        for name in (*_COUNTS, _GLOBAL):
            getattr(self, name).__iadd__(getattr(other, name))
        np.minimum(self.min, other.min, out=self.min)
        np.maximum(self.max, other.max, out=self.max)

    @property
    def std(self) -> Floats:
        """The standard deviation of every dimension."""
        return np.asarray(np.sqrt(self.squares / np.maximum(self.finite, 1)))

    @property
    def width(self) -> int:
        """How many dimensions there are."""
        return len(self.mean)

    def totals(self) -> dict[str, Any]:
        """Return the statistics of all elements together, as `harvest.json` has them."""
        count = int(self.finite.sum())
        if not count:
            return {"rows": self.rows, "finite": 0, "nonfinite": int(self.nonfinite.sum())}
        share = self.finite / count
        mean = float((self.mean * share).sum())
        variance = float(self.squares.sum() / count + (share * (self.mean - mean) ** 2).sum())
        return {
            "rows": self.rows, "finite": count, "nonfinite": int(self.nonfinite.sum()), "mean": mean,
            "std": variance**0.5, "min": float(self.min.min()), "max": float(self.max.max()),
            "zeros": int(self.zero.sum()),
        }  # fmt: skip

    def arrays(self, prefix: str) -> dict[str, Array]:
        """Return the numbers as arrays, by name, for a file."""
        named = {f"{prefix}.{name}": getattr(self, name) for name in (*_COUNTS, *_MOMENTS, _GLOBAL)}
        return {**named, f"{prefix}.rows": np.array([self.rows])}

    @classmethod
    def of_arrays(cls, arrays: dict[str, Array], prefix: str, width: int) -> SiteStatistics:
        """Return what `arrays` gave; ValueError when it is of another width or type."""
        named = {name: arrays[f"{prefix}.{name}"].copy() for name in (*_COUNTS, *_MOMENTS, _GLOBAL)}
        for name, array in named.items():
            size, kind = histogram.BUCKETS if name == _GLOBAL else width, "f" if name in _MOMENTS else "i"
            if array.shape != (size,) or array.dtype.kind != kind:
                raise ValueError(f"{prefix}.{name} must have {size} numbers, got {array.dtype} of {array.shape}")
        return cls(rows=int(arrays[f"{prefix}.rows"][0]), **named)
