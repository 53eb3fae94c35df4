"""Observe the calls of NNX and Equinox layers by patching their classes, which are restored at the end.

A transformation flattens a model and builds a new one, so layers are identified by their path in the object whose call
is the outermost one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax

from tensortap.adapters.jax import layer_names
from tensortap.adapters.jax.layers import arrays_of, kind_of, layers_of, paths_of, value_of
from tensortap.adapters.jax.operations import layer_scope
from tensortap.adapters.jax.tag import Mark, tag, watchable
from tensortap.adapters.jax.tap import JaxTap
from tensortap.adapters.nested import arguments_in, values_in

_LOCK: Final = threading.RLock()
_MISSING: Final = object()
_LIBRARIES: Final = ("flax", "equinox", "jax", "builtins", "abc", "typing")


class NamedTap(NamedTuple):
    """A tap, and the names under which it knows a layer."""

    tap: JaxTap
    paths: tuple[str, ...]


class _RunningCalls(threading.local):
    """The calls of layers in a thread."""

    def __init__(self) -> None:
        self.inside: list[Any] = []  # the modules whose calls are running
        self.children = 0  # how many calls of layers there have been
        self.numbers = itertools.count()


_RUNNING: Final = _RunningCalls()


class _Patch:
    """Replace a method of one class: `__call__`, or another one through which layers may be called."""

    def __init__(self, cls: type, name: str) -> None:
        self.cls = cls
        self.name = name
        self.own = vars(cls).get(name, _MISSING)
        self.taps: tuple[JaxTap, ...] = ()
        original = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        around = _called if name == "__call__" else _entered

        @functools.wraps(getattr(original, "__wrapped__", original))
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if _RUNNING.inside and _RUNNING.inside[-1] is module:  # a subclass that calls its base
                return original.__get__(module, type(module))(*args, **kwargs)
            return around(self.taps, module, original, args, kwargs)

        type.__setattr__(cls, name, call)

    def undo(self) -> None:
        """Restore the class."""
        if self.own is _MISSING:
            type.__delattr__(self.cls, self.name)
        else:
            type.__setattr__(self.cls, self.name, self.own)


_PATCHES: Final[dict[tuple[type, str], _Patch]] = {}
_ROOTS: Final[dict[int, type]] = {}  # the class of the model that a tap watches, by its number


def add_tap(tap: JaxTap, model: Any) -> None:
    """Let a tap observe the calls of a model's layers."""
    with _LOCK:
        _ROOTS[tap.number] = type(model)
        places = [(cls, "__call__") for cls in {type(layer.module) for layer in layers_of(model)}]
        if not tap.live:  # there, each outermost call would be a step
            places += [(type(model), name) for name in _methods(type(model))]
        for place in places:
            patch = _PATCHES.get(place) or _PATCHES.setdefault(place, _Patch(*place))
            patch.taps = (*patch.taps, tap)


def _methods(cls: type) -> set[str]:
    """Return the methods that a model has from the user's own classes, except special ones."""
    own = itertools.takewhile(lambda base: base.__module__.partition(".")[0] not in _LIBRARIES, cls.__mro__)
    held = {name: value for base in reversed([*own]) for name, value in vars(base).items()}
    return {n for n, v in held.items() if not n.startswith("__") and type(v).__name__ in ("function", "_wrap_method")}


def remove_tap(tap: JaxTap) -> None:
    """Remove a tap; a class without taps is restored."""
    with _LOCK:
        _ROOTS.pop(tap.number, None)
        for place, patch in list(_PATCHES.items()):
            patch.taps = tuple(other for other in patch.taps if other is not tap)
            if not patch.taps:
                del _PATCHES[place]
                patch.undo()


def _called(
    taps: Sequence[JaxTap], module: Any, original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run one call of a layer of NNX or Equinox."""
    active = [w for w in taps if w.listening()]
    with _outermost_call(active, module) as known:
        named = [NamedTap(w, paths) for w in active if (paths := w.layer_names(known) or _rebuilt_names(w, known))]
        _RUNNING.inside.append(known)
        try:
            output = call_with_tags(named, type(known), original.__get__(known, type(known)), args, kwargs)
        finally:
            _RUNNING.inside.pop()
        return output if known is module else layer_names.restored(output)


def _entered(
    taps: Sequence[JaxTap], module: Any, original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run one call of another method of a model: its layers are known inside, but the method is not a site."""
    with _outermost_call([w for w in taps if w.listening()], module) as known:
        output = original.__get__(known, type(known))(*args, **kwargs)
        return output if known is module else layer_names.restored(output)


@contextlib.contextmanager
def _outermost_call(active: Sequence[JaxTap], module: Any) -> Iterator[Any]:
    """Name the layers and tag the parameters for the taps of this model, unless a call of it is running."""
    with contextlib.ExitStack() as stack:
        entered = [w for w in active if w.is_root(module) and w.enter()]
        for tap in entered:
            stack.callback(tap.leave)
            module = stack.enter_context(_tagged_parameters(tap, module))
        yield stack.enter_context(_named_layers(entered, module)) if entered else module


@contextlib.contextmanager
def _named_layers(entered: Sequence[JaxTap], model: Any) -> Iterator[Any]:
    """Name the layers, also those that transformations inside the call rebuild."""
    try:
        with layer_names.with_names(model) as model:
            by_id = {identity: paths for identity, (_, paths) in paths_of(model).items()}
            for tap in entered:
                tap.set_layer_names(by_id)
            yield model
    except Exception:
        layer_names.keep_classes(model)
        raise


def _rebuilt_names(tap: JaxTap, module: Any) -> tuple[str, ...]:
    return layer_names.names_of(module, _ROOTS.get(tap.number))


@contextlib.contextmanager
def _tagged_parameters(tap: JaxTap, model: Any) -> Iterator[Any]:
    """Replace the model's parameters by tagged ones for the time of a call, to see their cotangents."""
    wanted = {path: p for path, p in arrays_of(model) if tap.selection.wants(path, "grad")}
    marked = {
        path: tag(value_of(p), (), [Mark(tap.number, path, "grad")], live=tap.live)
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


def call_with_tags(
    named: Sequence[NamedTap], cls: type, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a layer, with tags on its inputs and outputs."""
    if not named:
        return function(*args, **kwargs)
    for each in named:
        each.tap.selection.has_layers = True
    try:
        types = tuple(base.__name__ for base in cls.__mro__[:-1])
        args, kwargs = _tagged_arguments(named, types, function, args, kwargs)
    except Exception as error:
        _failed(named, error)
    before = _RUNNING.children
    with _scope(named):
        output = function(*args, **kwargs)
    leaf = before == _RUNNING.children
    _RUNNING.children += 1
    try:
        return _replaced(output, _tags(named, types, ("output", "grad_output"), values_in(output, _Arrays), leaf))
    except Exception as error:
        _failed(named, error)
        return output


def _failed(named: Sequence[NamedTap], error: Exception) -> None:
    for each in named:
        each.tap.failed(f"observing {each.paths[0]}", error)


def _scope(named: Sequence[NamedTap]) -> Any:
    if any(each.tap.selection.has_operations for each in named):
        return jax.named_scope(layer_scope(named[0].paths[0], next(_RUNNING.numbers)))
    return contextlib.nullcontext()


class _WatchableArrayType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return watchable(value)


class _Arrays(metaclass=_WatchableArrayType):
    """Arrays whose elements can be reduced, traced or not, for `isinstance`."""


def _tagged_arguments(
    named: Sequence[NamedTap], types: tuple[str, ...], function: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    if not any(
        w.selection.wants(path, port, types) for w, paths in named for path in paths for port in ("input", "grad_input")
    ):
        return args, kwargs
    found = arguments_in(function, args, kwargs, _Arrays)
    replaced: tuple[Any, Any] = _replaced((args, dict(kwargs)), _tags(named, types, ("input", "grad_input"), found))
    return replaced


def _tags(
    named: Sequence[NamedTap], types: tuple[str, ...], ports: tuple[str, str], found: Any, leaf: bool = True
) -> dict[int, Any]:
    """Return the tagged values, by the ids of the values found."""
    marked = {}
    for slot, value in found:
        marks, back = (
            [
                Mark(w.number, path, port, slot)
                for w, paths in named
                for path in paths
                if w.selection.wants(path, port, types, leaf)
            ]
            for port in ports
        )
        live = any(w.live for w, _ in named)
        if marks or back:
            marked[id(value)] = tag(value, marks, back, live=live)
    return marked


def _replaced(value: Any, marked: Mapping[int, Any]) -> Any:
    """Return the same nested value with the tagged arrays in it; objects other than containers stay as they are."""
    if not marked:
        return value
    if type(value) in (list, tuple):
        return type(value)(_replaced(part, marked) for part in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(part, marked) for part in value))
    if type(value) is dict:
        return {name: _replaced(part, marked) for name, part in value.items()}
    return marked.get(id(value), value)
