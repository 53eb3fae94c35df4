"""What was dropped, thinned, skipped or went wrong: counted always, said once, raised only when asked to."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import Counter


class TensortapWarning(UserWarning):
    """Something of ours went wrong beside the user's work, which goes on."""


class Counters:
    """Counts by name, and a warning the first time each thing happens.

    >>> counters = Counters()
    >>> counters.add("dropped_steps"); counters.add("dropped_steps", 2); counters.counts()
    {'dropped_steps': 3}
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._counts: Counter[str] = Counter()
        self._details: dict[str, str] = {}
        self._warned: set[str] = set()
        # A signal handler may count while the same thread is counting.
        self._lock = threading.RLock()
        _LEDGERS.add(self)

    def add(self, name: str, n: int = 1) -> None:
        """Count `n` more of something."""
        with self._lock:
            self._counts[name] += n

    def counts(self) -> dict[str, int]:
        """What was counted, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def details(self) -> dict[str, str]:
        """The first message of each kind of trouble."""
        with self._lock:
            return dict(self._details)

    def warn(self, key: str, message: str) -> None:
        """Say it the first time, and remember it."""
        with self._lock:
            if key in self._warned:
                return
            self._warned.add(key)
            self._details[key] = message
        warnings.warn(message, TensortapWarning, stacklevel=3)

    def failed(self, name: str, what: str, error: BaseException) -> None:
        """An error of ours or of a user's function: count it, name it once; with `strict` let it out."""
        self.note(name, what, error)
        if self.strict:
            raise error

    def note(self, name: str, what: str, error: BaseException) -> None:
        """Count an error and name it once, where nobody could catch it."""
        self.add(name)
        self.warn(
            f"{name}:{what}", f"{what} failed: {type(error).__name__}: {error} (counted as {name}; your code goes on)"
        )


_LEDGERS: weakref.WeakSet[Counters] = weakref.WeakSet()


def _after_fork() -> None:
    # Another thread may have held the lock, and it did not come along.
    for counters in list(_LEDGERS):
        counters._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
