"""The context by which JAX caches traces: inside ours functions are traced with tags, outside old traces are used."""

from __future__ import annotations

import threading
from typing import Any, Final

import jax

from tensortap.adapters.jax.tap import JaxTap

CONTEXT: Final = jax.make_user_context(None)


class _LiveTaps:
    """Keep the context entered while there are live taps, so that functions are traced with their tags."""

    def __init__(self) -> None:
        self._numbers: tuple[int, ...] = ()
        self._context: Any = None
        self._lock = threading.RLock()

    def add(self, tap: JaxTap) -> None:
        """Trace with the tags of one tap more."""
        self._change((*self._numbers, tap.number))

    def remove(self, tap: JaxTap) -> None:
        """Trace without the tags of a tap."""
        self._change(tuple(n for n in self._numbers if n != tap.number))

    def _change(self, numbers: tuple[int, ...]) -> None:
        with self._lock:
            if self._context is not None:
                self._context.__exit__(None, None, None)
                self._context = None
            if numbers:
                self._context = CONTEXT(("tensortap live", numbers))
                self._context.__enter__()
            self._numbers = numbers


LIVE_TAPS: Final = _LiveTaps()
