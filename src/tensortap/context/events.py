"""Events of a training besides its tensors: a loss was called, an optimizer was made, a rate has changed."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

MOST_EVENTS: Final = 20_000  # at most in one run; further ones are counted
SPARSE: Final = 0  # as `then` of a `Sampling`: at each power of two, and every 256th call
_LONGEST: Final = 256


class Event(NamedTuple):
    """One event: the step, its kind, what it is about, the line of the user's code, and a JSON object of details."""

    step: int
    kind: str
    name: str
    code: str
    data: str
    time: int


class EventLog:
    """Events that wait to be written; `step` returns the step that they belong to.

    >>> log = EventLog()
    >>> log.add("optimizer", "SGD", "train.py:12", {"lr": 0.1})
    >>> [(event.kind, event.data) for event in log.take()]
    [('optimizer', '{"lr": 0.1}')]
    """

    def __init__(
        self, step: Callable[[], int] = lambda: 0, dropped: Callable[[int], None] = lambda count: None
    ) -> None:
        self._step = step
        self._dropped = dropped
        self.waiting: list[Event] = []
        self._count = 0
        self._lock = threading.Lock()

    def add(self, kind: str, name: str, code: str, data: dict[str, Any]) -> None:
        """Note an event of the step that is open."""
        self.put(Event(self._step(), kind, name, code, json.dumps(plain(data)), time.time_ns() // 1000))

    def put(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            self._count += 1
            if self._count <= MOST_EVENTS:
                self.waiting.append(event)
                return
        self._dropped(1)

    def take(self) -> list[Event]:
        """Return the waiting events, and drop them."""
        if not self.waiting:
            return []
        with self._lock:
            events, self.waiting = self.waiting, []
        return events


class Sampling:
    """Choose calls to examine: the first ones, then fewer and fewer.

    >>> sampling = Sampling(first=2, then=4)
    >>> [n for n in range(20) if sampling.due()]
    [0, 1, 4, 8, 12, 16]
    >>> sampling = Sampling(first=2, then=SPARSE)
    >>> [n for n in range(40) if sampling.due()]
    [0, 1, 2, 4, 8, 16, 32]
    """

    __slots__ = ("_count", "_first", "_then")

    def __init__(self, first: int = 6, then: int = 8, *, count: int = 0) -> None:
        self._first = first
        self._then = then
        self._count = count

    def due(self) -> bool:
        """Count a call; return whether to look at it. After 256 calls it is every eighth of what it was before."""
        n = self._count
        self._count += 1
        if n < self._first:
            return True
        if self._then == SPARSE:
            return n % _LONGEST == 0 if n > _LONGEST else n & (n - 1) == 0
        return n % (self._then if n < _LONGEST else 8 * self._then) == 0


def plain(value: Any) -> Any:
    """Return a value as JSON has it; what is not finite becomes a text, and floats keep seven digits."""
    if type(value) in (str, int, bool):
        return value
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)
