"""The calls of modules of Linen and Haiku, seen by the libraries' own means."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from tensortap.adapters.jax.calls import Named, seen
from tensortap.adapters.jax.layers import dotted
from tensortap.adapters.jax.watcher import Watcher

_LOCK: Final = threading.RLock()


@contextlib.contextmanager
def intercepting(watchers: Callable[[], Sequence[Watcher]]) -> Iterator[None]:
    """Linen's and Haiku's own way to see calls, in this thread."""

    def linen_call(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        return _intercepted(watchers(), context, lambda module: ".".join(module.path), function, args, kwargs)

    def haiku_call(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        return _intercepted(watchers(), context, lambda m: dotted(m.module_name), function, args, kwargs)

    with contextlib.ExitStack() as stack:
        if linen := sys.modules.get("flax.linen"):
            stack.enter_context(linen.intercept_methods(linen_call))
        if haiku := sys.modules.get("haiku"):
            stack.enter_context(haiku.intercept_methods(haiku_call))
        yield


def _intercepted(
    watchers: Sequence[Watcher], context: Any, path_of: Callable[[Any], str], function: Any, args: Any, kwargs: Any
) -> Any:
    if context.method_name != "__call__":
        return function(*args, **kwargs)
    path = path_of(context.module)
    named = [Named(w, (path,)) for w in watchers if w.listening()]
    return seen(named, type(context.module), function, args, kwargs)


class Interceptors:
    """For live taps: calls are seen for as long as somebody listens."""

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()
        self._stack = contextlib.ExitStack()

    def join(self, watcher: Watcher) -> None:
        """Let a watcher see the calls of all modules."""
        with _LOCK:
            if not self.watchers:
                self._stack.enter_context(intercepting(lambda: self.watchers))
            self.watchers = (*self.watchers, watcher)

    def leave(self, watcher: Watcher) -> None:
        """Take it away."""
        with _LOCK:
            had = bool(self.watchers)
            self.watchers = tuple(other for other in self.watchers if other is not watcher)
            if had and not self.watchers:
                self._stack.close()


INTERCEPTORS: Final = Interceptors()
