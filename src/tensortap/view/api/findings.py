"""What the rules say of a run: worked out in the background, for a run of any length within bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from tensortap.diagnose import findings as diagnosed
from tensortap.store.filters import Sites, Steps
from tensortap.store.run import Run
from tensortap.view.api.bins import Bins
from tensortap.view.api.grid import Ints
from tensortap.view.api.history import History
from tensortap.view.api.seen import Seen
from tensortap.view.api.stats import STATS

RECORDS: Final = 1_000_000  # rules hold their columns in memory; beyond so many records they look at some steps only
REST: Final = 5.0  # a live run is looked at again after so many times what the last look took, and so many seconds
_ENDS: Final = 32
_BAD: Final = 64


class Thinned(Run):
    """A run of which only some steps are seen."""

    def __init__(self, path: str, only: list[int]) -> None:
        super().__init__(path)
        self._only = only

    def table(
        self, sites: Sites = None, ports: Any = None, steps: Steps = None, columns: Any = None
    ) -> Any:  # fmt: skip
        """As of any run, but of these steps unless others are asked for."""
        return super().table(sites, ports, self._only if steps is None else steps, columns)


class Checked:
    """The findings of one run as they come; a run that grows is looked at again now and then."""

    def __init__(
        self, history: History, pool: ThreadPoolExecutor, clock: Callable[[], float] = time.monotonic,
        limit: int = RECORDS,
    ) -> None:  # fmt: skip
        self._history = history
        self._pool = pool
        self._clock = clock
        self._limit = limit
        self._known: dict[str, Any] = {}
        self._version = ""
        self._again = 0.0
        self._coming: Future[None] | None = None

    def now(self) -> dict[str, Any]:
        """What is known; `running` while there is more to come."""
        seen = self._history.watched.look()
        running = self._coming is not None and not self._coming.done()
        if seen.version != self._version and not running and self._clock() >= self._again:
            self._coming, running = self._pool.submit(self._look, seen), True
        if self._coming is not None and self._coming.done() and (error := self._coming.exception()) is not None:
            return {"error": f"{type(error).__name__}: {error}", "running": False}
        empty: dict[str, Any] = {"counts": {}, "findings": [], "rules": [], "skipped": {}}
        return {**(self._known or empty), "version": self._version, "running": running}

    def complete(self) -> dict[str, Any]:
        """The findings of the run as it is now, waited for."""
        seen = self._history.watched.look()
        if seen.version != self._version:
            self._look(seen)
        return {**self._known, "version": self._version, "running": False}

    def _look(self, seen: Seen) -> None:
        begin, run = self._clock(), self._history.watched.run
        try:
            steps = self._steps(seen)
            found = diagnosed(run if steps is None else Thinned(run.path, steps.tolist())).as_json()
            looked = len(seen.steps) if steps is None else len(steps)
            self._known = {**found, "steps": {"looked": looked, "of": len(seen.steps)}}
        finally:
            self._version = seen.version
            self._again = self._clock() + max(REST, REST * (self._clock() - begin))

    def _steps(self, seen: Seen) -> Ints | None:
        """The steps that rules look at when there are too many: evenly spread, both ends, and where NaN is."""
        if seen.records <= self._limit:
            return None
        total = len(seen.steps)
        per_step = max(1, seen.records // total)
        spread = np.linspace(0, total - 1, max(2, self._limit // per_step)).astype(np.int64)
        ends = [np.arange(min(_ENDS, total)), np.arange(max(0, total - _ENDS), total)]
        return np.unique(np.concatenate([seen.steps[spread], *(seen.steps[end] for end in ends), self._bad(seen)]))

    def _bad(self, seen: Seen) -> Ints:
        """The first steps in which something was not finite."""
        found: list[Ints] = []
        for first in range(0, len(seen.steps), 4096):
            bins = Bins(0, first, min(first + 4096, len(seen.steps)))
            marks = self._history.grid(seen, STATS["nonfinite"], bins).bad
            if marks is not None:
                found.append(seen.steps[bins.first : bins.last][marks.any(axis=1)])
            if sum(map(len, found)) >= _BAD:
                break
        return np.concatenate(found)[:_BAD] if found else np.zeros(0, np.int64)
