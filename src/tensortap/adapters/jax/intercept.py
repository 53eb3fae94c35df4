"""Observe the calls of Linen and Haiku modules by the libraries' own `intercept_methods`."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from tensortap.adapters.jax.calls import NamedTap, call_with_tags
from tensortap.adapters.jax.layers import dotted
from tensortap.adapters.jax.tap import JaxTap

_LOCK: Final = threading.RLock()


@contextlib.contextmanager
def intercepting(taps: Callable[[], Sequence[JaxTap]]) -> Iterator[None]:
    """Intercept the calls of modules in this thread."""

    def linen_call(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        return _intercepted(taps(), context, lambda module: ".".join(module.path), function, args, kwargs)

    def haiku_call(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        return _intercepted(taps(), context, lambda m: dotted(m.module_name), function, args, kwargs)

    with contextlib.ExitStack() as stack:
        if linen := sys.modules.get("flax.linen"):
            stack.enter_context(linen.intercept_methods(linen_call))
        if haiku := sys.modules.get("haiku"):
            stack.enter_context(haiku.intercept_methods(haiku_call))
        yield


def _intercepted(
    taps: Sequence[JaxTap], context: Any, path_of: Callable[[Any], str], function: Any, args: Any, kwargs: Any
) -> Any:
    if context.method_name != "__call__":
        return function(*args, **kwargs)
    path = path_of(context.module)
    named = [NamedTap(w, (path,)) for w in taps if w.listening()]
    return call_with_tags(named, type(context.module), function, args, kwargs)


class Interceptors:
    """Intercept calls for live taps, while there are any."""

    def __init__(self) -> None:
        self.taps: tuple[JaxTap, ...] = ()
        self._stack = contextlib.ExitStack()

    def add(self, tap: JaxTap) -> None:
        """Let a tap observe the calls of all modules."""
        with _LOCK:
            if not self.taps:
                self._stack.enter_context(intercepting(lambda: self.taps))
            self.taps = (*self.taps, tap)

    def remove(self, tap: JaxTap) -> None:
        """Remove a tap."""
        with _LOCK:
            had = bool(self.taps)
            self.taps = tuple(other for other in self.taps if other is not tap)
            if had and not self.taps:
                self._stack.close()


INTERCEPTORS: Final = Interceptors()
