"""Measure what observing costs, by site and as a share of the step time."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap import text
from tensortap.record.budget import Budget
from tensortap.record.table import Names, StepTable

# What a record costs besides what the kernel notes, in a real step where the caches hold the model and not our code:
# PyTorch's own part of a hook, 1.5 µs, where C answers it, and 5 µs where Python does (100 × (Linear 64 + ReLU)).
_AROUND: Final = 4e-6
_STEPS_AT_A_TIME: Final = 32  # steps whose costs are added up at a time


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
        self._taken: deque[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = deque()
        self._by_key: npt.NDArray[np.float64] = np.zeros(64)

    def take(self, table: StepTable) -> None:
        """Note what the rows of a closing step cost."""
        rows = table.rows
        if rows:
            self._taken.append((table.columns["key"][:rows].copy(), table.columns["cost"][:rows].copy()))

    def closed(self, closing: float, whole: float, observed: bool) -> None:
        """Note that a step took `whole` seconds, of which `closing` were spent closing it, besides its rows."""
        self._own += closing
        self._whole += whole
        self.steps += 1
        if self.budget is not None:
            self.budget.closed(self._add_up() + closing, whole, observed)
        elif len(self._taken) >= _STEPS_AT_A_TIME:
            self._add_up()

    def _add_up(self) -> float:
        """Add up the noted costs by place and return their sum. Done for several steps at once, as it costs too."""
        taken = []
        with contextlib.suppress(IndexError):  # one by one: other threads note and add up too
            while True:
                taken.append(self._taken.popleft())
        if not taken:
            return 0.0
        seconds = np.concatenate([cost for _, cost in taken]) * 1e-9 + _AROUND
        by_key = np.bincount(np.concatenate([key for key, _ in taken]), seconds)
        if len(self._by_key) < len(by_key):
            self._by_key = np.concatenate([self._by_key, np.zeros(len(by_key))])
        self._by_key[: len(by_key)] += by_key
        own = float(seconds.sum())
        self._own += own
        return own

    def report(self, names: Names) -> Cost:
        """Return the cost so far."""
        self._add_up()
        by_site = {str(place): float(s) for place, s in zip(names.places, self._by_key, strict=False) if s}
        bare = self._whole - self._own
        return Cost(self._own / bare if bare > 0 else 0.0, self._own, self.steps, by_site)
