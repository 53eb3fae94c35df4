"""Number steps: all in one sequence, or each phase in its own."""

from __future__ import annotations

from collections import defaultdict


class StepNumbers:
    """Give numbers to steps, from `start` on. A phase that was entered has its own sequence.

    >>> numbers = StepNumbers(0)
    >>> numbers.take(), numbers.take()
    (0, 1)
    >>> numbers.move(1, "eval"), numbers.move(0, "")
    (0, 1)
    """

    def __init__(self, start: int) -> None:
        self.phase = ""
        self._next: defaultdict[str, int] = defaultdict(lambda: start)

    def take(self) -> int:
        """Return the next number of the current phase."""
        number = self._next[self.phase]
        self._next[self.phase] = number + 1
        return number

    def move(self, number: int, phase: str) -> int:
        """Give a number back that the current phase has just given out, and return the next one of another phase."""
        if self._next[self.phase] == number + 1:
            self._next[self.phase] = number
        self.phase = phase
        return self.take()
