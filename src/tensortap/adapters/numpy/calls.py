"""Seeing the calls of chosen objects by their class: a descriptor around each method, and a registry by object.

`obj(x)` looks `__call__` up on the type, so nothing put on the object itself would be found; and an object whose
class is exchanged, or that is wrapped, is no longer the object it was. So the class's own entry is wrapped, asks the
registry whether this object is watched, and is put back when nobody watches any object of the class any more.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol


class Hook(Protocol):
    """Sees one layer's calls for one tap. It raises nothing, unless the user asked for it."""

    def begin(self) -> None:
        """A method begins that may call the layer."""

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A call begins."""

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is to be called in place of the layer's function: as a rule that itself."""

    def after(self, output: Any) -> None:
        """It has returned."""

    def ended(self) -> None:
        """It is over, also when it failed."""


class _Thread(threading.local):
    """What is running in a thread, outermost first: the objects whose methods are being called."""

    def __init__(self) -> None:
        self.running: list[int] = []  # in a method that reports
        self.frames: list[Any] = []  # in any method


class Entry:
    """A watched object: the hooks of every tap on it."""

    __slots__ = ("hooks", "reference", "value")

    def __init__(self, value: Any) -> None:
        self.hooks: tuple[Hook, ...] = ()
        self.reference: Any = None
        self.value: Any = None
        try:
            self.reference = weakref.ref(value, partial(_forget, id(value)))
        except TypeError:  # it takes no weak references; its number must not be given to another while it is watched
            self.value = value


def _forget(key: int, _: object) -> None:
    WATCHED.pop(key, None)


WATCHED: Final[dict[int, Entry]] = {}
THREAD: Final = _Thread()
_LOCK: Final = threading.RLock()
_METHODS: dict[tuple[type, str], Method] = {}


class Method:
    """Sits in a class in place of a method. For objects that nobody watches it gives what was there."""

    def __init__(self, original: Any, name: str, reports: bool) -> None:
        self.original = original
        self.name = name
        self.reports = reports
        self.users = 0

    def __get__(self, value: Any, owner: type | None = None) -> Any:
        get = getattr(type(self.original), "__get__", None)
        bound = self.original if get is None else get(self.original, value, owner)
        return bound if value is None or id(value) not in WATCHED else Bound(bound, value, self.reports)

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)  # such as __isabstractmethod__

    def __reduce__(self) -> Any:
        """Whoever pickles the class by value gets the method itself."""
        return (copy.copy, (self.original,))


class Bound:
    """A watched object's method, bound to it."""

    __slots__ = ("__wrapped__", "reports", "value")

    def __init__(self, bound: Callable[..., Any], value: Any, reports: bool) -> None:
        self.__wrapped__ = bound
        self.value = value
        self.reports = reports

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, seen by the hooks unless a call of the same object is being seen already."""
        thread, key = THREAD, id(self.value)
        entry = WATCHED.get(key)
        if entry is None or key in thread.running:
            return self.__wrapped__(*args, **kwargs)
        thread.frames.append(self.value)
        if self.reports:
            thread.running.append(key)
        try:
            hooks = entry.hooks if self.reports else tuple(map(Frame, entry.hooks))
            return run_hooked(self.__wrapped__, hooks, args, kwargs)
        finally:
            thread.frames.pop()
            if self.reports:
                thread.running.pop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == (other.__wrapped__ if isinstance(other, Bound) else other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)


class Frame:
    """A hook as seen from a method that is no call of the layer: only the step's begin and end pass through."""

    __slots__ = ("hook",)

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def begin(self) -> None:
        """A method within the method."""

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A call begins."""
        self.hook.begin()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself."""
        return function

    def after(self, output: Any) -> None:
        """It has returned."""

    def ended(self) -> None:
        """It is over."""
        self.hook.ended()


def run_hooked(
    function: Callable[..., Any], hooks: tuple[Hook, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function with hooks before and after it."""
    begun: list[Hook] = []
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


def watch(value: Any, hook: Hook, methods: Mapping[str, type], reports: Callable[[str], bool]) -> None:
    """Let a hook see an object's calls: the methods, each with the class that defines it."""
    with _LOCK:
        entry = WATCHED.get(id(value))
        if entry is None:
            entry = WATCHED[id(value)] = Entry(value)
        entry.hooks = (*entry.hooks, hook)
        for name, owner in methods.items():
            method = _METHODS.get((owner, name))
            if method is None:
                method = _METHODS[owner, name] = Method(vars(owner)[name], name, reports(name))
                setattr(owner, name, method)
            method.users += 1


def unwatch(key: int, hook: Hook, methods: Mapping[str, type]) -> None:
    """Take a hook away, by its object's id: the object may be gone. A class nobody watches gets its own back."""
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
        if vars(owner).get(name) is method:  # somebody else's wrapper around ours stays, and ours is inert
            setattr(owner, name, method.original)
