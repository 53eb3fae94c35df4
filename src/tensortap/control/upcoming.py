"""The trigger of a capture: the next steps that begin, whatever their numbers are."""

from __future__ import annotations

from tensortap.select.triggers import Answer, Trigger
from tensortap.types import StepOutcome


class Upcoming(Trigger):
    """Want the next `steps` steps that begin, from step `start` on.

    >>> trigger = Upcoming(2, start=10)
    >>> [trigger.before(step).name for step in (9, 10, 11, 12)]
    ['NO', 'MAYBE', 'MAYBE', 'NO']

    A step that it wants is always kept; it says MAYBE because a budget thins only steps with a YES.
    """

    def __init__(self, steps: int, start: int = 0) -> None:
        self.steps = steps
        self.start = start
        self.taken: list[int] = []
        self._open: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether all its steps have ended."""
        return len(self.taken) >= self.steps and not self._open

    def before(self, step: int) -> Answer:
        """Return MAYBE for the next steps until there are enough, then NO. A step that is restarted is counted once."""
        if step in self._open:
            return Answer.MAYBE
        if step < self.start or len(self.taken) >= self.steps:
            return Answer.NO
        self.taken.append(step)
        self._open.add(step)
        return Answer.MAYBE

    def after(self, step: int, seen: StepOutcome) -> str | None:
        """Say why a step that was wanted is kept."""
        if step not in self._open:
            return None
        self._open.discard(step)
        return "ctl capture"

    def __repr__(self) -> str:
        return f"the next {self.steps} steps" if self.steps > 1 else "the next step"


class Never(Trigger):
    """Want no step: the trigger of a probe that was removed."""

    def before(self, step: int) -> Answer:
        """Return NO."""
        return Answer.NO

    def after(self, step: int, seen: StepOutcome) -> str | None:
        """Keep none."""
        return None

    def __repr__(self) -> str:
        return "never"
