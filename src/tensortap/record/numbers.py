"""Number steps: all in one sequence, or each phase in its own."""

from __future__ import annotations

from collections import defaultdict


class StepNumbers:
    """Give numbers to steps, from `start` on. A phase that was entered has its own sequence.

    With `by_phase` that holds for every step whose phase is known when it opens, also for other threads' steps.

    >>> numbers = StepNumbers(0)
    >>> numbers.take(), numbers.take()
    (0, 1)
    >>> numbers.move(1, "eval"), numbers.move(0, "")
    (0, 1)
    """

    def __init__(self, start: int) -> None:
        self.phase = ""
        self.by_phase = False
        self.ahead = 0  # numbers of the current phase that were used since the last one was taken
        self._next: defaultdict[str, int] = defaultdict(lambda: start)

    def take(self, phase: str = "") -> int:
        """Return the next number of a phase; of the current one, where none is given or phases share numbers."""
        if self.ahead:
            self._catch_up()
        of = phase if phase and self.by_phase else self.phase
        number = self._next[of]
        self._next[of] = number + 1
        return number

    def move(self, number: int, phase: str) -> int:
        """Give a number back that the current phase has just given out, and return the next one of another phase."""
        self._catch_up()
        if self._next[self.phase] == number + 1:
            self._next[self.phase] = number
        self.phase, self.by_phase = phase, True
        return self.take()

    def _catch_up(self) -> None:
        self._next[self.phase] += self.ahead
        self.ahead = 0
