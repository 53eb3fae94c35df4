"""Which probes want a step: what is known ahead agrees with what the triggers say when they are asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from tensortap.record.arming import ProbeTriggers
from tensortap.record.counters import Counters
from tensortap.select.triggers.base import Answer, Trigger
from tensortap.types import StepOutcome

THIN = (tt.powers_of(2) | tt.at([0, 3])) | tt.every(256)


@pytest.mark.parametrize("when", [THIN, tt.every(7), tt.between(20, 40), tt.chance(0.05), ~tt.every(3)], ids=str)
def test_what_is_known_ahead_is_what_the_triggers_say(when: Trigger) -> None:
    """Beside a probe that wants every step, the other one is armed in just the steps that it wants."""
    probes = (tt.probe("a"), tt.probe("b", when=when))
    triggers = ProbeTriggers(probes, None, Counters())
    for step in range(600):
        wanted = when.before(step) is Answer.YES
        assert triggers.arm(step, False)[:3] == (step, 0b11 if wanted else 0b01, 0)
        assert (step in triggers.known) == (not wanted)
        assert triggers.fired(step, StepOutcome({}, 0)).keys() == ({0, 1} if wanted else {0})
        assert triggers.arm(step, True)[1] == 0


class Remembering(Trigger):
    """A trigger that knows before each step that it does not want it, and counts the steps."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def before(self, step: int) -> Answer:
        """Want no step."""
        return Answer.NO

    def after(self, step: int, seen: StepOutcome) -> str | None:
        """Remember the step."""
        self.seen.append(step)
        return None

    def fresh(self) -> Trigger:
        """Stay the same, so that the test can ask."""
        return self


def test_a_trigger_with_a_history_sees_every_step() -> None:
    """Nothing is known ahead where a trigger has to be told of every step."""
    trigger, memory = Remembering(), tt.Memory()
    with tt.watch(tt.probe("a"), tt.probe("**", when=trigger), to=memory) as tap:
        for _ in range(5):
            tt.tap(np.ones(3), "a")
            tap.step()
    assert trigger.seen == [0, 1, 2, 3, 4] and [record.step for record in memory.records] == [0, 1, 2, 3, 4]


def test_a_step_like_the_one_before_is_closed_in_few_calls(tmp_path: Path) -> None:
    """Each call of Python takes microseconds where a training has used the caches: 34 are made, 48 once were."""
    calls: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    with tt.watch(tt.probe("a"), tt.probe("a", keep=tt.histogram(), when=THIN), to=tmp_path / "run") as tap:
        for step in range(12):
            tt.tap(np.ones(3), "a")
            sys.setprofile(note if step == 11 else None)
            tap.step()
            sys.setprofile(None)
    assert "TailFile.write_by" in calls and len(calls) <= 34, calls
