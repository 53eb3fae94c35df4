"""What JAX keeps traced functions by: inside a context of ours they are traced with tags, outside as they were."""

from __future__ import annotations

import threading
from typing import Any, Final

import jax

from tensortap.adapters.jax.watcher import Watcher

CONTEXT: Final = jax.make_user_context(None)


class _Live:
    """While somebody listens to live tags, functions are traced with them; before and after, as they were."""

    def __init__(self) -> None:
        self._numbers: tuple[int, ...] = ()
        self._context: Any = None
        self._lock = threading.RLock()

    def join(self, watcher: Watcher) -> None:
        """One more."""
        self._change((*self._numbers, watcher.number))

    def leave(self, watcher: Watcher) -> None:
        """One less."""
        self._change(tuple(n for n in self._numbers if n != watcher.number))

    def _change(self, numbers: tuple[int, ...]) -> None:
        with self._lock:
            if self._context is not None:
                self._context.__exit__(None, None, None)
                self._context = None
            if numbers:
                self._context = CONTEXT(("tensortap live", numbers))
                self._context.__enter__()
            self._numbers = numbers


LIVE: Final = _Live()
