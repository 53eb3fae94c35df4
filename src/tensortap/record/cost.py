"""Measure what observing costs, by site and as a share of the step time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap import text
from tensortap.record.budget import Budget
from tensortap.record.table import Names, StepTable
from tensortap.reduce import kernel as kernels


class Cost(NamedTuple):
    """What observing has cost so far. `print()` shows the most expensive sites."""

    share: float
    seconds: float
    steps: int
    by_site: Mapping[str, float]

    def __str__(self) -> str:
        head = f"{100 * self.share:.2f} % of the step time: {text.number(self.seconds)} s in {self.steps} steps"
        most_expensive = sorted(self.by_site.items(), key=lambda item: -item[1])[:5]
        return "\n".join([head, *(f"  {text.number(1e3 * seconds)} ms  {site}" for site, seconds in most_expensive)])


class Account:
    """Add up what observing costs, and tell the budget where there is one."""

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget
        self.steps = 0
        self._own = 0.0
        self._whole = 0.0
        self._of_rows = 0.0  # what the rows cost that the budget has not been told of
        self._by_key: npt.NDArray[np.float64] = np.zeros(0)
        self._reserve(64)

    def take(self, table: StepTable) -> None:
        """Add what the rows of a closing step cost."""
        seconds = -1.0
        if kernels.charge is not None:
            seconds = kernels.charge(table.bound, self._address, len(self._by_key))
        if seconds < 0:
            seconds = self._charge(table)
        self._own += seconds
        if self.budget is not None:
            self._of_rows += seconds

    def closed(self, closing: float, whole: float, observed: bool) -> None:
        """Note that a step took `whole` seconds, of which `closing` were spent closing it, besides its rows."""
        self._own += closing
        self._whole += whole
        self.steps += 1
        if self.budget is not None:
            rows, self._of_rows = self._of_rows, 0.0
            self.budget.closed(rows + closing, whole, observed)

    def report(self, names: Names) -> Cost:
        """Return the cost so far."""
        by_site = {str(place): float(s) for place, s in zip(names.places, self._by_key, strict=False) if s}
        bare = self._whole - self._own
        return Cost(self._own / bare if bare > 0 else 0.0, self._own, self.steps, by_site)

    def _charge(self, table: StepTable) -> float:
        """Do the same without C, or where there are new keys."""
        keys, seconds = table.column("key"), table.column("cost") * 1e-9
        self._reserve(int(keys.max(initial=0)) + 1)
        np.add.at(self._by_key, keys, seconds)
        return float(seconds.sum())

    def _reserve(self, keys: int) -> None:
        """Make room for the totals of so many keys."""
        known = self._by_key
        if len(known) < keys:
            self._by_key = np.zeros(max(keys, 2 * len(known)))
            self._by_key[: len(known)] = known
            self._address = self._by_key.ctypes.data
