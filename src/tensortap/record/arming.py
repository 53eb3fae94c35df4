"""Ask the probes' triggers: before a step whether they may want it, after it whether they do."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Final

from tensortap.record.budget import Budget
from tensortap.record.counters import Counters
from tensortap.record.open_step import Armed
from tensortap.select.probes import Probe
from tensortap.select.triggers import Answer
from tensortap.types import StepOutcome

_FARTHEST: Final = 256  # steps that are looked at together
_STEPS_WITHOUT_METRIC: Final = 100  # after so many steps a metric that a trigger reads and nobody gave is warned of


class ProbeTriggers:
    """Arm steps and collect the reasons to keep them. A trigger that raises is counted and asked again next step."""

    def __init__(self, probes: Sequence[Probe], budget: Budget | None, counters: Counters) -> None:
        self.histogram_probes = sum(probe.histogram << i for i, probe in enumerate(probes))
        self.hash_probes = sum(probe.hashed << i for i, probe in enumerate(probes))
        self._probes = probes
        self._budget = budget
        self._counters = counters
        self._metrics = _MetricCheck({name for probe in probes for name in probe.when.metrics()}, counters)
        self.keep_history = not all(probe.when.scheduled for probe in probes)  # then each has to see every step
        # Why every step is kept, by the probes that want every one; the others are asked.
        self.always = {i: str(probe.when) for i, probe in enumerate(probes) if probe.when.always}
        self._always = sum(1 << i for i in self.always)
        self._others = [probe.when for probe in probes if not probe.when.always]
        # In these steps it is known, before they come, that only the probes that want every one want them.
        self.known = range(0) if self._others else range(sys.maxsize)

    def arm(self, number: int, paused: bool) -> Armed:
        """Ask every trigger about a step that is about to begin."""
        armed, maybe = (self._always, 0) if number in self.known else self._asked(number)
        armed = 0 if paused else armed
        if self._budget is None:
            return number, armed, maybe, self.histogram_probes
        armed, hist = self._within_budget(self._budget, armed, maybe)
        return number, armed, maybe, hist

    def _asked(self, number: int) -> tuple[int, int]:
        """Return the probes that want a step or may want it, and those that cannot tell yet."""
        armed = maybe = 0
        for i, probe in enumerate(self._probes):
            try:
                answer = probe.when.before(number)
            except Exception as error:
                self._counters.failed("trigger_errors", f"trigger {probe.when}", error)
                answer = Answer.MAYBE
            if answer is not Answer.NO:
                armed |= 1 << i
                maybe |= (answer is Answer.MAYBE) << i
        if armed == self._always != 0 and not maybe and not self.keep_history:
            self.known = range(number, number + 1 + self._unwanted_by_others(number))
        return armed, maybe

    def unwanted_after(self, number: int) -> int:
        """Return how many steps that follow a step no trigger wants, as far as that is known before them."""
        return 0 if self._always or self._budget is not None else self._unwanted_by_others(number)

    def _unwanted_by_others(self, number: int) -> int:
        if self.keep_history:
            return 0
        try:
            for ahead in range(1, _FARTHEST):
                if any(trigger.before(number + ahead) is not Answer.NO for trigger in self._others):
                    return ahead - 1
        except Exception:  # counted when the step comes
            return 0
        return _FARTHEST - 1

    def fired(self, number: int, outcome: StepOutcome) -> dict[int, str]:
        """Return the probes that want the step, with their reasons. Every trigger is asked: it may keep history."""
        reasons = {}
        for i, probe in enumerate(self._probes):
            try:
                reason = probe.when.after(number, outcome)
            except Exception as error:
                self._counters.failed("trigger_errors", f"trigger {probe.when}", error)
                continue
            if reason is not None:
                reasons[i] = reason
        return reasons

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Warn once of a metric that a trigger reads and that no step has given."""
        self._metrics.closed(metrics)

    def warn_of_missing_metrics(self) -> None:
        """At the end: warn of metrics that triggers read and that no step has given, however few steps there were."""
        self._metrics.ended()

    def _within_budget(self, budget: Budget, armed: int, maybe: int) -> tuple[int, int]:
        """Return the armed probes that the budget allows, and which may take histograms. Triggers are never thinned."""
        hist = self.histogram_probes
        thinned = armed & ~maybe & (self._always if budget.every_step_only else -1)
        if not thinned:
            return armed, hist
        if not budget.allows():
            self._counters.add("thinned_steps")
            return armed & ~thinned, hist
        if hist & armed & ~maybe and not budget.histograms():
            self._counters.add("thinned_histograms")
            hist &= maybe
        return armed, hist


class _MetricCheck:
    def __init__(self, read: set[str], counters: Counters) -> None:
        self._read = read
        self._given: set[str] = set()
        self._steps = 0
        self._counters = counters

    def closed(self, metrics: Mapping[str, float]) -> None:
        if self._steps >= _STEPS_WITHOUT_METRIC:
            return
        self._given.update(metrics)
        self._steps += 1
        if self._steps == _STEPS_WITHOUT_METRIC:
            self._warn_of_missing()

    def ended(self) -> None:
        if 0 < self._steps < _STEPS_WITHOUT_METRIC:
            self._warn_of_missing()

    def _warn_of_missing(self) -> None:
        for name in sorted(self._read - self._given):
            self._warn(name)

    def _warn(self, name: str) -> None:
        known = ", ".join(sorted(self._given)) or "none"
        self._counters.add("metrics_missing")
        self._counters.warn(
            f"metric:{name}",
            f"a trigger reads the metric {name!r}, which no step has given so far (seen: {known}); "
            f"pass it as tap.step({name}=...)",
        )
