"""Change the probes of a running tap: captures that end by themselves, probes that are added and removed."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from tensortap import text
from tensortap.adapters.named_values import NamedValueRecorder
from tensortap.adapters.plan import Plan
from tensortap.adapters.protocol import Adapter
from tensortap.control.requests import ControlRequest
from tensortap.control.upcoming import Never, Upcoming
from tensortap.errors import ControlError
from tensortap.record.recorder import Recorder
from tensortap.reduce.reducers import full, parse_reducer
from tensortap.select.probes import MOST_PROBES, Probe, probe
from tensortap.select.sites import Pattern
from tensortap.select.triggers import every


class ProbeChanges:
    """The probes of one tap as they change. Each method returns a sentence for whoever asked.

    Probes keep their positions, which rows refer to. A removed one leaves a gap, which a capture may fill.
    """

    def __init__(self, adapter: Adapter, recorder: Recorder, named_values: NamedValueRecorder) -> None:
        self._adapter = adapter
        self._recorder = recorder
        self._named_values = named_values
        self.changed = False
        self._plan = Plan({})
        self._captures: dict[int, Upcoming] = {}  # by the position of their probe
        self._gaps: list[int] = []  # positions of captures that are over

    @property
    def capturing(self) -> bool:
        """Whether a capture is going on."""
        return bool(self._captures)

    def capture(self, request: ControlRequest) -> str:
        """Keep more of some sites for a few steps."""
        trigger = Upcoming(request.steps, request.start)
        chosen = probe(*request.sites, keep=_reducers(request), when=trigger)
        return f"keeps {_kept(chosen)} of {self._take(chosen, trigger)}, {self._when(request)}"

    def snapshot(self, request: ControlRequest) -> str:
        """Keep the tensors of everything that is watched, and all parameters, of one step."""
        patterns = list(dict.fromkeys(pattern for each in self._recorder.probes for pattern in each.patterns))
        if any("param" in candidate.ports for candidate in self._adapter.candidates()):
            patterns.append(Pattern.parse("**:param"))
        if not patterns:
            raise ControlError("there is nothing to keep: all probes were removed")
        trigger = Upcoming(1, request.start)
        many = self._take(probe(*patterns, keep=full(), when=trigger), trigger)
        return f"keeps the tensors of {many}, {self._when(request)}"

    def add(self, request: ControlRequest) -> str:
        """Observe more sites from now on."""
        position = len(self._recorder.probes)
        if position >= MOST_PROBES:
            raise ControlError(f"there must be at most {MOST_PROBES} probes, and there are as many")
        chosen = probe(*request.sites, keep=_reducers(request), when=every(request.every))
        self._use((*self._recorder.probes, chosen))
        return f"probe {position} keeps {_kept(chosen)} of {self._count(position)}, when {chosen.when}"

    def remove(self, request: ControlRequest) -> str:
        """Stop observing the sites of a probe."""
        position = self._position(request)
        gone = self._recorder.probes[position]
        probes = [*self._recorder.probes]
        probes[position] = replace(gone, patterns=(), when=Never(), where=None)
        self._use(tuple(probes))
        if self._captures.pop(position, None) is not None:
            self._gaps.append(position)
        return f"probe {position} was removed: {', '.join(pattern.text for pattern in gone.patterns)}"

    def _position(self, request: ControlRequest) -> int:
        there = {i: each for i, each in enumerate(self._recorder.probes) if each.patterns}
        found = [i for i, each in there.items() if {p.text for p in each.patterns} & set(request.sites)]
        number = request.probe if request.probe is not None else found[0] if len(found) == 1 else None
        if number not in there:
            known = "; ".join(f"{i}: {', '.join(p.text for p in each.patterns)}" for i, each in there.items())
            raise ControlError(f"probe remove must name one of the probes by its number, which are {known or 'none'}")
        return number

    def _take(self, chosen: Probe, trigger: Upcoming) -> str:
        """Use one more probe until its trigger is done; return how many sites it chose."""
        probes = [*self._recorder.probes]
        position = self._gaps[-1] if self._gaps else len(probes)
        if position >= MOST_PROBES:
            raise ControlError(f"there must be at most {MOST_PROBES} probes, and there are as many")
        probes[position : position + 1] = [chosen]
        self._use(tuple(probes))
        if self._gaps:
            self._gaps.pop()
        self._captures[position] = trigger
        return self._count(position)

    def end_captures(self) -> list[dict[str, Any]]:
        """Remove the probes of captures that have all their steps; return what each has captured."""
        ended = []
        for position in [i for i, trigger in self._captures.items() if trigger.done]:
            trigger, gone = self._captures.pop(position), self._recorder.probes[position]
            probes = [*self._recorder.probes]
            probes[position] = replace(gone, patterns=(), when=Never())
            with contextlib.suppress(Exception):  # then its hooks stay, and record nothing
                self._use(tuple(probes))
                self._gaps.append(position)
            ended.append({"sites": [pattern.text for pattern in gone.patterns], "steps": trigger.taken})
        return ended

    def _use(self, probes: tuple[Probe, ...]) -> None:
        """Use these probes, or go on with those there were."""
        recorder, adapter, before = self._recorder, self._adapter, self._recorder.probes
        plan, self.changed = adapter.plan(probes), True
        recorder.use_probes(probes)
        try:
            adapter.change(recorder, plan)
        except Exception:
            recorder.use_probes(before)
            adapter.change(recorder, adapter.plan(before))
            raise
        finally:
            self._named_values.use_probes()
        self._plan = plan

    def _when(self, request: ControlRequest) -> str:
        """Describe how long it lasts, and the first step if ranks begin together."""
        first = max(request.start, self._recorder.current.number + 1)
        begin = f"from step {first} on" if request.start else "from the next step on"
        return f"for {text.counted(request.steps, 'step')} {begin}"

    def _count(self, position: int) -> str:
        many = sum(any(bit >> position & 1 for _, bit in patterns) for patterns in self._plan.ports.values())
        return text.counted(many, "site") if many else "what turns up"


def _reducers(request: ControlRequest) -> list[Any] | None:
    return [parse_reducer(each) for each in request.keep] or None


def _kept(chosen: Probe) -> str:
    return ", ".join(reducer.describe()["kind"] for reducer in chosen.keep)
