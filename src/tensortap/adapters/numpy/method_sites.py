"""Observe the public methods of one object as layers, for networks that are written as methods of one class.

    class Net:
        def conv_layer(self, x): ...
        def relu(self, x): ...
        def forward(self, x): return self.relu(self.conv_layer(x))

As in calls.py a descriptor takes the method's place in the class; it is restored when no hook observes the method any
more.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Final

from tensortap.adapters.numpy.calls import CallHook, run_hooked

_LOCK: Final = threading.RLock()
_SITES: Final[dict[tuple[type, str], MethodSite]] = {}


class _RunningMethods(threading.local):
    """The observed methods that run in a thread, each with the id of its object."""

    def __init__(self) -> None:
        self.methods: list[tuple[int, str]] = []


_RUNNING: Final = _RunningMethods()


class MethodSite:
    """Take the place of a method in a class. For objects that are not observed it returns the method itself."""

    def __init__(self, original: Any, name: str) -> None:
        self.original = original
        self.name = name
        self.hooks: dict[int, tuple[CallHook, ...]] = {}  # by the id of the object

    def __get__(self, value: Any, owner: type | None = None) -> Any:
        bound = self.original.__get__(value, owner)
        return bound if value is None or id(value) not in self.hooks else partial(self._call, id(value), bound)

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    def __reduce__(self) -> Any:
        """Pickle, where a class is pickled by value, the method itself."""
        return (copy.copy, (self.original,))

    def _call(self, key: int, bound: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running = _RUNNING.methods
        if (key, self.name) in running:  # a method that calls itself counts as one call
            return bound(*args, **kwargs)
        running.append((key, self.name))
        try:
            return run_hooked(bound, self.hooks.get(key, ()), args, kwargs)
        finally:
            running.pop()


def observe_method(value: Any, name: str, hook: CallHook) -> Callable[[], None]:
    """Let a hook observe the calls of one method of one object; return what ends it."""
    owner = next(cls for cls in type(value).__mro__ if name in vars(cls))
    key = id(value)
    with _LOCK:
        site = _SITES.get((owner, name))
        if site is None:
            site = _SITES[owner, name] = MethodSite(vars(owner)[name], name)
            setattr(owner, name, site)
        site.hooks[key] = (*site.hooks.get(key, ()), hook)
    try:
        gone: Any = weakref.finalize(value, site.hooks.pop, key, None)
        gone.atexit = False
    except TypeError:  # it takes no weak references
        gone = None
    return partial(_forget, owner, site, key, hook, gone)


def _forget(owner: type, site: MethodSite, key: int, hook: CallHook, gone: Any) -> None:
    with _LOCK:
        if gone is not None:
            gone.detach()
        rest = tuple(other for other in site.hooks.pop(key, ()) if other is not hook)
        if rest:
            site.hooks[key] = rest
        if not site.hooks and _SITES.pop((owner, site.name), None) is not None and vars(owner)[site.name] is site:
            setattr(owner, site.name, site.original)


def public_methods(cls: type, is_own: Callable[[type], bool]) -> list[str]:
    """Return the methods of the user's own classes that take an argument, in order of definition."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if is_own(base):
            found.update(vars(base))
    return [name for name, value in found.items() if not name.startswith("_") and _takes_argument(value)]


def _takes_argument(value: Any) -> bool:
    original = value.original if isinstance(value, MethodSite) else value
    function = original.__func__ if isinstance(original, staticmethod) else original
    if not isinstance(function, FunctionType):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    return len(parameters) > (0 if isinstance(original, staticmethod) else 1)
