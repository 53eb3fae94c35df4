"""A compiled function of the user, and the call of it that is observed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Protocol

import jax

try:
    from jax._src.core import trace_state_clean
except ImportError:  # of another version

    def trace_state_clean() -> bool:
        """Return whether nothing is being traced."""
        return not isinstance(jax.numpy.zeros(()), jax.core.Tracer)


class CallListener(Protocol):
    """Listen to calls of compiled functions. No method may raise."""

    def before_call(self, function: WatchedFunction, args: Any, kwargs: Any) -> None:
        """Act before a function runs, which may donate its arguments."""

    def after_call(self, function: WatchedFunction, results: Any) -> None:
        """Act on what the function returned."""


class WatchedFunction:
    """Behave as the compiled function it replaces, and report calls outside of a trace to the listener."""

    def __init__(self, function: Callable[..., Any], listener: CallListener) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self._listener = listener
        self.calls = 0
        self.signature: inspect.Signature | None = None
        with contextlib.suppress(TypeError, ValueError):
            self.signature = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        if not trace_state_clean():
            return self.function(*args, **kwargs)
        self.calls += 1
        self._listener.before_call(self, args, kwargs)
        results = self.function(*args, **kwargs)
        self._listener.after_call(self, results)
        return results

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind as a method does."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the function itself (`lower`, `trace`, `clear_cache`, …)."""
        function = self.__dict__.get("function")
        if function is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(function, name)

    def __repr__(self) -> str:
        return repr(self.function)
