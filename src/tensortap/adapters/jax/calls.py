"""The calls of layers, seen: classes of NNX and Equinox are patched, and go back as they were.

A model is built anew whenever a transformation takes it apart, so its layers are known by their place in the object
whose call is the outermost one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax

from tensortap.adapters.jax.layers import arrays_of, kind_of, layers_of, value_of
from tensortap.adapters.jax.operations import layer_scope
from tensortap.adapters.jax.tag import Mark, tag, watchable
from tensortap.adapters.jax.watcher import Watcher
from tensortap.adapters.walk import arguments_in, values_in

_LOCK: Final = threading.RLock()
_MISSING: Final = object()


class Named(NamedTuple):
    """A watcher, and the names under which it knows what is called."""

    watcher: Watcher
    paths: tuple[str, ...]


class _Local(threading.local):
    def __init__(self) -> None:
        self.inside: list[Any] = []  # the modules whose calls are running
        self.children = 0  # how many calls of layers there have been
        self.numbers = itertools.count()


_LOCAL: Final = _Local()


class _Patch:
    """Stands in for the `__call__` of one class."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.own = vars(cls).get("__call__", _MISSING)
        self.watchers: tuple[Watcher, ...] = ()
        original = next(vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base))

        @functools.wraps(getattr(original, "__wrapped__", original))
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if _LOCAL.inside and _LOCAL.inside[-1] is module:  # a subclass that calls its base
                return original.__get__(module, type(module))(*args, **kwargs)
            return _called(self.watchers, module, original, args, kwargs)

        type.__setattr__(cls, "__call__", call)

    def undo(self) -> None:
        """The class as it was."""
        if self.own is _MISSING:
            type.__delattr__(self.cls, "__call__")
        else:
            type.__setattr__(self.cls, "__call__", self.own)


_PATCHES: Final[dict[type, _Patch]] = {}


def join(watcher: Watcher, model: Any) -> None:
    """Let a watcher see the calls of a model's layers."""
    with _LOCK:
        for cls in {type(layer.module) for layer in layers_of(model)}:
            patch = _PATCHES.get(cls) or _PATCHES.setdefault(cls, _Patch(cls))
            patch.watchers = (*patch.watchers, watcher)


def leave(watcher: Watcher) -> None:
    """Take it away; a class that nobody watches is as it was."""
    with _LOCK:
        for cls, patch in list(_PATCHES.items()):
            patch.watchers = tuple(other for other in patch.watchers if other is not watcher)
            if not patch.watchers:
                del _PATCHES[cls]
                patch.undo()


def _called(
    watchers: Sequence[Watcher], module: Any, original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """One call of a layer of NNX or Equinox."""
    with contextlib.ExitStack() as stack:
        active = [w for w in watchers if w.listening()]
        for watcher in active:
            if watcher.is_root(module) and watcher.enter():
                stack.callback(watcher.leave)
                module = stack.enter_context(_parameters_seen(watcher, module))
                watcher.know({id(m): p for m, p in _paths(module).values()}, module)
        named = [Named(w, paths) for w in active if (paths := w.names(module))]
        _LOCAL.inside.append(module)
        stack.callback(_LOCAL.inside.pop)
        function = original.__get__(module, type(module))
        return seen(named, type(module), function, args, kwargs)


def _paths(model: Any) -> dict[int, tuple[Any, tuple[str, ...]]]:
    found: dict[int, tuple[Any, tuple[str, ...]]] = {}
    for layer in layers_of(model):
        found[id(layer.module)] = (layer.module, (*found.get(id(layer.module), (None, ()))[1], layer.path))
    return found


@contextlib.contextmanager
def _parameters_seen(watcher: Watcher, model: Any) -> Iterator[Any]:
    """For the length of a call, parameters that tell their cotangents."""
    wanted = {path: p for path, p in arrays_of(model) if watcher.wants(path, "grad")}
    marked = {
        path: tag(value_of(p), (), [Mark(watcher.number, path, "grad")], live=watcher.live)
        for path, p in wanted.items()
        if watchable(value_of(p))
    }
    if not marked:
        yield model
    elif kind_of(model) == "nnx":
        before = {path: value_of(wanted[path]) for path in marked}
        for path, value in marked.items():
            wanted[path][...] = value
        try:
            yield model
        finally:
            for path, value in before.items():
                wanted[path][...] = value
    else:
        by_id = {id(wanted[path]): value for path, value in marked.items()}
        yield jax.tree.map(lambda leaf: by_id.get(id(leaf), leaf), model)


def seen(
    named: Sequence[Named], cls: type, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a layer, with tags on what it is given and what it gives."""
    if not named:
        return function(*args, **kwargs)
    for each in named:
        each.watcher.has_layers = True
    try:
        types = tuple(base.__name__ for base in cls.__mro__[:-1])
        args, kwargs = _tagged_arguments(named, types, function, args, kwargs)
    except Exception as error:
        _failed(named, error)
    before = _LOCAL.children
    with _scope(named):
        output = function(*args, **kwargs)
    leaf = before == _LOCAL.children
    _LOCAL.children += 1
    try:
        return _replaced(output, _tags(named, types, ("output", "grad_output"), values_in(output, _Any), leaf))
    except Exception as error:
        _failed(named, error)
        return output


def _failed(named: Sequence[Named], error: Exception) -> None:
    for each in named:
        each.watcher.failed(f"observing {each.paths[0]}", error)


def _scope(named: Sequence[Named]) -> Any:
    if any(each.watcher.operations for each in named):
        return jax.named_scope(layer_scope(named[0].paths[0], next(_LOCAL.numbers)))
    return contextlib.nullcontext()


class _AnyKind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return watchable(value)


class _Any(metaclass=_AnyKind):
    """An array whose elements can be reduced, traced or not."""


def _tagged_arguments(
    named: Sequence[Named], types: tuple[str, ...], function: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    if not any(w.wants(path, port, types) for w, paths in named for path in paths for port in ("input", "grad_input")):
        return args, kwargs
    found = arguments_in(function, args, kwargs, _Any)
    replaced: tuple[Any, Any] = _replaced((args, dict(kwargs)), _tags(named, types, ("input", "grad_input"), found))
    return replaced


def _tags(
    named: Sequence[Named], types: tuple[str, ...], ports: tuple[str, str], found: Any, leaf: bool = True
) -> dict[int, Any]:
    """The values found, by their identity, each with its tag."""
    marked = {}
    for slot, value in found:
        marks, back = (
            [
                Mark(w.number, path, port, slot)
                for w, paths in named
                for path in paths
                if w.wants(path, port, types, leaf)
            ]
            for port in ports
        )
        live = any(w.live for w, _ in named)
        if marks or back:
            marked[id(value)] = tag(value, marks, back, live=live)
    return marked


def _replaced(value: Any, marked: Mapping[int, Any]) -> Any:
    """The same nested value with the tagged arrays in it; objects other than containers are as they are."""
    if not marked:
        return value
    if type(value) in (list, tuple):
        return type(value)(_replaced(part, marked) for part in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(part, marked) for part in value))
    if type(value) is dict:
        return {name: _replaced(part, marked) for name, part in value.items()}
    return marked.get(id(value), value)
