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

from tensortap.adapters.jax import carried
from tensortap.adapters.jax.layers import arrays_of, kind_of, layers_of, paths_of, value_of
from tensortap.adapters.jax.operations import layer_scope
from tensortap.adapters.jax.tag import Mark, tag, watchable
from tensortap.adapters.jax.watcher import Watcher
from tensortap.adapters.nested import arguments_in, values_in

_LOCK: Final = threading.RLock()
_MISSING: Final = object()
_LIBRARIES: Final = ("flax", "equinox", "jax", "builtins", "abc", "typing")


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
    """Stands in for a method of one class: `__call__`, or another by which the layers of a model may be reached."""

    def __init__(self, cls: type, name: str) -> None:
        self.cls = cls
        self.name = name
        self.own = vars(cls).get(name, _MISSING)
        self.watchers: tuple[Watcher, ...] = ()
        original = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        around = _called if name == "__call__" else _entered

        @functools.wraps(getattr(original, "__wrapped__", original))
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if _LOCAL.inside and _LOCAL.inside[-1] is module:  # a subclass that calls its base
                return original.__get__(module, type(module))(*args, **kwargs)
            return around(self.watchers, module, original, args, kwargs)

        type.__setattr__(cls, name, call)

    def undo(self) -> None:
        """The class as it was."""
        if self.own is _MISSING:
            type.__delattr__(self.cls, self.name)
        else:
            type.__setattr__(self.cls, self.name, self.own)


_PATCHES: Final[dict[tuple[type, str], _Patch]] = {}
_ROOTS: Final[dict[int, type]] = {}  # the class of the model that a watcher watches, by its number


def join(watcher: Watcher, model: Any) -> None:
    """Let a watcher see the calls of a model's layers."""
    with _LOCK:
        _ROOTS[watcher.number] = type(model)
        places = [(cls, "__call__") for cls in {type(layer.module) for layer in layers_of(model)}]
        if not watcher.live:  # there, each outermost call would be a step
            places += [(type(model), name) for name in _methods(type(model))]
        for place in places:
            patch = _PATCHES.get(place) or _PATCHES.setdefault(place, _Patch(*place))
            patch.watchers = (*patch.watchers, watcher)


def _methods(cls: type) -> set[str]:
    """The methods that the user's own classes give a model, special ones apart."""
    own = itertools.takewhile(lambda base: base.__module__.partition(".")[0] not in _LIBRARIES, cls.__mro__)
    held = {name: value for base in reversed([*own]) for name, value in vars(base).items()}
    return {n for n, v in held.items() if not n.startswith("__") and type(v).__name__ in ("function", "_wrap_method")}


def leave(watcher: Watcher) -> None:
    """Take it away; a class that nobody watches is as it was."""
    with _LOCK:
        _ROOTS.pop(watcher.number, None)
        for place, patch in list(_PATCHES.items()):
            patch.watchers = tuple(other for other in patch.watchers if other is not watcher)
            if not patch.watchers:
                del _PATCHES[place]
                patch.undo()


def _called(
    watchers: Sequence[Watcher], module: Any, original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """One call of a layer of NNX or Equinox."""
    active = [w for w in watchers if w.listening()]
    with _outermost(active, module) as known:
        named = [Named(w, paths) for w in active if (paths := w.names(known) or _carried(w, known))]
        _LOCAL.inside.append(known)
        try:
            output = seen(named, type(known), original.__get__(known, type(known)), args, kwargs)
        finally:
            _LOCAL.inside.pop()
        return output if known is module else carried.restored(output)


def _entered(
    watchers: Sequence[Watcher], module: Any, original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """One call of another method of a model: its layers are known in it, and it is no layer itself."""
    with _outermost([w for w in watchers if w.listening()], module) as known:
        output = original.__get__(known, type(known))(*args, **kwargs)
        return output if known is module else carried.restored(output)


@contextlib.contextmanager
def _outermost(active: Sequence[Watcher], module: Any) -> Iterator[Any]:
    """For those to whom this is the model, and no call of it is running: its layers by name, and its parameters."""
    with contextlib.ExitStack() as stack:
        entered = [w for w in active if w.is_root(module) and w.enter()]
        for watcher in entered:
            stack.callback(watcher.leave)
            module = stack.enter_context(_parameters_seen(watcher, module))
        yield stack.enter_context(_known(entered, module)) if entered else module


@contextlib.contextmanager
def _known(entered: Sequence[Watcher], model: Any) -> Iterator[Any]:
    """The layers by name, as they are, and as transformations inside the call build them anew."""
    try:
        with carried.carrying(model) as model:
            names = {identity: paths for identity, (_, paths) in paths_of(model).items()}
            for watcher in entered:
                watcher.know(names, model)
            yield model
    except Exception:
        carried.failed(model)
        raise


def _carried(watcher: Watcher, module: Any) -> tuple[str, ...]:
    return carried.names(module, _ROOTS.get(watcher.number))


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
