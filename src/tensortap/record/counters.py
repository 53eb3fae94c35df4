"""Count every drop; warn once per kind; raise only with `strict=True`."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter

from tensortap.portable import after_fork


class TensortapWarning(UserWarning):
    """Something of tensortap failed; the user's own work goes on."""


class Counters:
    """Count what is dropped, thinned, skipped or failed, by name, and warn the first time.

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
        _COUNTERS.add(self)

    def add(self, name: str, n: int = 1) -> None:
        """Count `n` more of something."""
        with self._lock:
            self._counts[name] += n

    def counts(self) -> dict[str, int]:
        """Return the counts by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def details(self) -> dict[str, str]:
        """Return the first message of each kind of failure."""
        with self._lock:
            return dict(self._details)

    def warn(self, key: str, message: str) -> None:
        """Warn the first time that `key` occurs, and remember the message."""
        with self._lock:
            if key in self._warned:
                return
            self._warned.add(key)
            self._details[key] = message
        warnings.warn(message, TensortapWarning, stacklevel=3)

    def failed(self, name: str, what: str, error: BaseException) -> None:
        """Count an error and warn of it once; with `strict` raise it."""
        self.note(name, what, error)
        if self.strict:
            raise error

    def note(self, name: str, what: str, error: BaseException) -> None:
        """Count an error and warn of it once, where nobody could catch it: on a thread of ours, or in a hook."""
        self.add(name)
        self.warn(
            f"{name}:{what}", f"{what} failed: {type(error).__name__}: {error} (counted as {name}; your code goes on)"
        )


_COUNTERS: weakref.WeakSet[Counters] = weakref.WeakSet()


def _after_fork() -> None:
    # Another thread may have held the lock, and it did not come along.
    for counters in list(_COUNTERS):
        counters._lock = threading.RLock()


after_fork(_after_fork)
