"""Ask the rules about a run in the background, within bounded memory for a run of any length."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from tensortap.diagnose.check import findings_in
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import as_rules
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot
from tensortap.view.api.about import model_name
from tensortap.view.api.bins import StepBins
from tensortap.view.api.grid import Ints
from tensortap.view.api.headline import groups_as_json, headline
from tensortap.view.api.stats import STATS
from tensortap.view.api.tiles import TiledGrids
from tensortap.view.api.timeline import timeline

RECORDS: Final = 1_000_000  # rules hold their columns in memory; beyond so many records they see some steps only
REST: Final = 5.0  # the rules are asked again after so many times what the last asking took, and so many seconds
_ENDS: Final = 32
_BAD: Final = 64


class BackgroundFindings:
    """The findings of one run as they come, renewed now and then while the run grows."""

    def __init__(
        self, run: Run, grids: TiledGrids, pool: ThreadPoolExecutor, clock: Callable[[], float] = time.monotonic,
        limit: int = RECORDS,
    ) -> None:  # fmt: skip
        self._run = run
        self._grids = grids
        self._pool = pool
        self._clock = clock
        self._limit = limit
        self._known: dict[str, Any] = {}
        self._version = ""
        self._again = 0.0
        self._coming: Future[None] | None = None

    def now(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what is known; `running` while there is more to come."""
        running = self._coming is not None and not self._coming.done()
        if snapshot.version != self._version and not running and self._clock() >= self._again:
            self._coming, running = self._pool.submit(self._ask, snapshot), True
        if self._coming is not None and self._coming.done() and (error := self._coming.exception()) is not None:
            return {"error": f"{type(error).__name__}: {error}", "running": False}
        empty: dict[str, Any] = {
            "counts": {}, "findings": [], "rules": [], "skipped": {}, "groups": [], "headline": ""
        }  # fmt: skip
        return {**(self._known or empty), "version": self._version, "running": running}

    def complete(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the findings of a snapshot, waited for."""
        if snapshot.version != self._version:
            self._ask(snapshot)
        return {**self._known, "version": self._version, "running": False}

    def _ask(self, snapshot: Snapshot) -> None:
        begin = self._clock()
        try:
            steps = self._steps(snapshot)
            only = None if steps is None else steps.tolist()
            history = RunHistory(self._run, snapshot=snapshot, only=only)
            found = findings_in(history, as_rules(None))
            looked = len(snapshot.steps) if steps is None else len(steps)
            self._known = {
                **found.as_json(), "groups": groups_as_json(found),
                "headline": headline(found, timeline(snapshot), model_name(snapshot.run_json)),
                "steps": {"looked": looked, "of": len(snapshot.steps)},
            }  # fmt: skip
        finally:
            self._version = snapshot.version
            self._again = self._clock() + max(REST, REST * (self._clock() - begin))

    def _steps(self, snapshot: Snapshot) -> Ints | None:
        """Return the steps that rules see when there are too many: evenly spread, both ends, and where NaN is."""
        if snapshot.record_count <= self._limit:
            return None
        total = len(snapshot.steps)
        per_step = max(1, snapshot.record_count // total)
        spread = np.linspace(0, total - 1, max(2, self._limit // per_step)).astype(np.int64)
        ends = [np.arange(min(_ENDS, total)), np.arange(max(0, total - _ENDS), total)]
        return np.unique(
            np.concatenate([snapshot.steps[spread], *(snapshot.steps[end] for end in ends), self._bad(snapshot)])
        )

    def _bad(self, snapshot: Snapshot) -> Ints:
        """Return the first steps in which something was not finite."""
        found: list[Ints] = []
        for first in range(0, len(snapshot.steps), 4096):
            bins = StepBins(0, first, min(first + 4096, len(snapshot.steps)))
            marks = self._grids.grid(snapshot, STATS["nonfinite"], bins).bad
            if marks is not None:
                found.append(snapshot.steps[bins.first : bins.last][marks.any(axis=1)])
            if sum(map(len, found)) >= _BAD:
                break
        return np.concatenate(found)[:_BAD] if found else np.zeros(0, np.int64)
