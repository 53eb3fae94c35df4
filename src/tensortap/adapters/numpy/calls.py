"""Observe the calls of chosen objects through their class: a descriptor for each method, and a registry of objects.

`obj(x)` looks `__call__` up on the type, so an attribute of the object itself would not be found; and an object whose
class is replaced, or that is wrapped, fails `type(x) is C`, `pickle` or `deepcopy`. So the class's own entry is
replaced by a descriptor that asks the registry whether this object is watched. The entry is restored when no object of
the class is watched any more.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol


class CallHook(Protocol):
    """Observe one layer's calls for one tap. It raises nothing unless the user asked for it."""

    def begin(self) -> None:
        """Act when a method begins that may call the layer."""

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Act before a call."""

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call in place of the layer's function: usually the function itself."""

    def after(self, output: Any) -> None:
        """Act after a call has returned."""

    def ended(self) -> None:
        """Act when a call is over, also when it failed."""


class _RunningObjects(threading.local):
    """The objects whose methods run in a thread, outermost first."""

    def __init__(self) -> None:
        self.running: list[int] = []  # ids, in a method that is observed
        self.owners: list[Any] = []  # in any method


class WatchedObject:
    """A watched object: the hooks of every tap on it."""

    __slots__ = ("hooks", "reference", "value")

    def __init__(self, value: Any) -> None:
        self.hooks: tuple[CallHook, ...] = ()
        self.reference: Any = None
        self.value: Any = None
        try:
            self.reference = weakref.ref(value, partial(_forget, id(value)))
        except TypeError:  # it takes no weak references; its id must not be reused while it is watched
            self.value = value


def _forget(key: int, _: object) -> None:
    WATCHED.pop(key, None)


WATCHED: Final[dict[int, WatchedObject]] = {}
THREAD: Final = _RunningObjects()
_LOCK: Final = threading.RLock()
_METHODS: dict[tuple[type, str], MethodDescriptor] = {}


class MethodDescriptor:
    """Take the place of a method in a class. For objects that are not watched it returns the method itself."""

    def __init__(self, original: Any, name: str, observed: bool) -> None:
        self.original = original
        self.name = name
        self.observed = observed
        self.users = 0

    def __get__(self, value: Any, owner: type | None = None) -> Any:
        get = getattr(type(self.original), "__get__", None)
        bound = self.original if get is None else get(self.original, value, owner)
        return bound if value is None or id(value) not in WATCHED else BoundMethod(bound, value, self.observed)

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)  # such as __isabstractmethod__

    def __reduce__(self) -> Any:
        """Pickle, where a class is pickled by value, the method itself."""
        return (copy.copy, (self.original,))


class BoundMethod:
    """A watched object's method, bound to it."""

    __slots__ = ("__wrapped__", "observed", "value")

    def __init__(self, bound: Callable[..., Any], value: Any, observed: bool) -> None:
        self.__wrapped__ = bound
        self.value = value
        self.observed = observed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it through the hooks, unless a call of the same object is being observed already."""
        thread, key = THREAD, id(self.value)
        entry = WATCHED.get(key)
        if entry is None or key in thread.running:
            return self.__wrapped__(*args, **kwargs)
        thread.owners.append(self.value)
        if self.observed:
            thread.running.append(key)
        try:
            hooks = entry.hooks if self.observed else tuple(map(StepOnlyHook, entry.hooks))
            return run_hooked(self.__wrapped__, hooks, args, kwargs)
        finally:
            thread.owners.pop()
            if self.observed:
                thread.running.pop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == (other.__wrapped__ if isinstance(other, BoundMethod) else other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)


class StepOnlyHook:
    """A hook around a method that is not a call of the layer, such as `fit`: only a step begins and ends."""

    __slots__ = ("hook",)

    def __init__(self, hook: CallHook) -> None:
        self.hook = hook

    def begin(self) -> None:
        """Do nothing for a method within the method."""

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Act before a call."""
        self.hook.begin()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself."""
        return function

    def after(self, output: Any) -> None:
        """Act after a call has returned."""

    def ended(self) -> None:
        """End the step."""
        self.hook.ended()


def run_hooked(
    function: Callable[..., Any], hooks: tuple[CallHook, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function with hooks before and after it."""
    begun: list[CallHook] = []
    try:
        for hook in hooks:
            begun.append(hook)
            hook.before(function, args, kwargs)
        called = function
        for hook in hooks:
            called = hook.around(called)
        output = called(*args, **kwargs)
        for hook in hooks:
            hook.after(output)
        return output
    finally:
        for hook in begun:
            hook.ended()


def watch(value: Any, hook: CallHook, methods: Mapping[str, type], observed: Callable[[str], bool]) -> None:
    """Let a hook observe an object's calls of these methods, each with the class that defines it."""
    with _LOCK:
        entry = WATCHED.get(id(value))
        if entry is None:
            entry = WATCHED[id(value)] = WatchedObject(value)
        entry.hooks = (*entry.hooks, hook)
        for name, owner in methods.items():
            method = _METHODS.get((owner, name))
            if method is None:
                method = _METHODS[owner, name] = MethodDescriptor(vars(owner)[name], name, observed(name))
                setattr(owner, name, method)
            method.users += 1


def unwatch(key: int, hook: CallHook, methods: Mapping[str, type]) -> None:
    """Remove a hook, by its object's id, as the object may be gone. A class without hooks is restored."""
    with _LOCK:
        entry = WATCHED.get(key)
        if entry is not None:
            entry.hooks = tuple(other for other in entry.hooks if other is not hook)
            if not entry.hooks:
                WATCHED.pop(key, None)
        for name, owner in methods.items():
            _release(owner, name)


def _release(owner: type, name: str) -> None:
    method = _METHODS[owner, name]
    method.users -= 1
    if method.users == 0:
        del _METHODS[owner, name]
        if vars(owner).get(name) is method:  # another library's wrapper around ours stays, and ours does nothing
            setattr(owner, name, method.original)
