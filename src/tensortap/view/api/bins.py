"""Put steps into bins of 1, 2, 4, 8 … recorded steps, at fixed positions, so that the screen can show them.

Bins are counted in recorded steps, not in step numbers, so that `every(100)` leaves no holes, and begin at multiples of
their size, so that a zoom and its neighbours share what was computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.view.api.grid import Ints


class StepBins(NamedTuple):
    """`1 << level` recorded steps a bin, from the `first`-th bin to before the `last`-th."""

    level: int
    first: int
    last: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.last - self.first

    def steps(self, total: int) -> tuple[int, int]:
        """Return the recorded steps they cover, as indices."""
        return self.first << self.level, min(self.last << self.level, total)


def bins_for(low: int, high: int, width: int) -> StepBins:
    """Return the smallest bins such that at most `width` of them cover the recorded steps from `low` to before `high`.

    >>> bins_for(0, 5000, 1000)
    StepBins(level=3, first=0, last=625)
    """
    level = 0
    while ((high - 1) >> level) - (low >> level) + 1 > width:
        level += 1
    return StepBins(level, low >> level, ((high - 1) >> level) + 1 if high > low else low >> level)


def edges(bins: StepBins, steps: Ints) -> npt.NDArray[np.float64]:
    """Return the step each bin begins with, and where the last one ends."""
    if not bins.size:
        return np.zeros(1)
    low, high = bins.steps(len(steps))
    starts = steps[low : high : 1 << bins.level]
    return np.append(starts, steps[high] if high < len(steps) else steps[-1] + _gap(steps)).astype(np.float64)


def _gap(steps: Ints) -> float:
    """Return how far recorded steps usually lie apart."""
    return float(np.median(np.diff(steps[-64:]))) if len(steps) > 1 else 1.0
