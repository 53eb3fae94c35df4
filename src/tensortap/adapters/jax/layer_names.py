"""Attach names to layers, so that a layer is recognised after a transformation has rebuilt it inside a call.

A module of NNX has its names in an extra attribute, which splitting and merging keep; a module of Equinox gets a
subclass of its class, which flattening keeps. Both are there only while a call or a step is traced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from tensortap.adapters.jax.layers import is_layer, kind_of, paths_of

_NAMES: Final = "_tensortap_names"
_NODES: Final = "_pytree__nodes"  # where NNX notes which attributes hold arrays
Names = tuple[tuple[type, tuple[str, ...]], ...]  # (the class of a model, the layer's paths in it), …

_CLASSES: Final[dict[tuple[type, Names], type]] = {}
_KEPT_CLASSES: Final[set[type]] = set()  # models whose layers must be of one class, to be stacked


def names_of(module: Any, root: type | None) -> tuple[str, ...]:
    """Return the paths of a module in a model of this class."""
    attached: Names = vars(module).get(_NAMES) or getattr(type(module), _NAMES, ())
    return next((paths for model, paths in attached if model is root), ())


@contextmanager
def with_names(model: Any) -> Iterator[Any]:
    """Yield a model whose layers have their names attached, for the time of a call."""
    if kind_of(model) != "nnx":
        yield _renamed(model)
        return
    mine = add_names(model)
    try:
        yield model
    finally:
        for module in mine:
            _remove_names(module)


def keep_classes(model: Any) -> None:
    """Stop giving the layers of this model subclasses: a call with them has failed, perhaps because of them."""
    if kind_of(model) == "equinox":
        _KEPT_CLASSES.add(_own_class(type(model)))


def add_names(model: Any) -> list[Any]:
    """Attach names to the modules of an NNX model; return those that had none before."""
    root, mine = type(model), []
    for module, paths in paths_of(model).values():
        held: Names = vars(module).get(_NAMES, ())
        if root not in dict(held):
            vars(module)[_NAMES] = (*held, (root, paths))
            mine += [] if held else [module]
    return mine


def remove_names(objects: Any) -> None:
    """Remove the names from modules of NNX."""
    for each in objects:
        for _, module in sys.modules["flax.nnx"].iter_graph(each):
            if _NAMES in getattr(module, "__dict__", ()):
                _remove_names(module)


def _remove_names(module: Any) -> None:
    own = vars(module)
    own.pop(_NAMES, None)
    nodes = own.get(_NODES, {})
    if _NAMES in nodes:  # a merge has set the attribute, and NNX has noted that
        own[_NODES] = type(nodes)({name: data for name, data in nodes.items() if name != _NAMES})


def _renamed(model: Any) -> Any:
    """Return a model of Equinox whose layers have subclasses of their own."""
    root = type(model)
    if root in _KEPT_CLASSES:
        return model
    paths = {identity: ((root, found),) for identity, (_, found) in paths_of(model).items() if found != ("",)}
    return _rebuilt(model, {}, paths)


def restored(value: Any) -> Any:
    """Return the output of a call with layers of their original classes."""
    return _rebuilt(value, {}, None)


def _rebuilt(value: Any, done: dict[int, Any], paths: Mapping[int, Names] | None) -> Any:
    """Return the same nested value with layers of other classes; a value without layers is returned itself."""
    if id(value) not in done:
        done[id(value)] = value  # one that contains itself
        done[id(value)] = _rebuilt_here(value, done, paths)
    return done[id(value)]


def _rebuilt_here(value: Any, done: dict[int, Any], paths: Mapping[int, Names] | None) -> Any:
    if type(value) is dict:
        parts: Any = {name: _rebuilt(part, done, paths) for name, part in value.items()}
        return parts if any(parts[name] is not value[name] for name in value) else value
    if type(value) in (list, tuple):
        parts = [_rebuilt(part, done, paths) for part in value]
        return type(value)(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return _module(value, done, paths) if kind_of(value) == "equinox" else value


def _module(value: Any, done: dict[int, Any], paths: Mapping[int, Names] | None) -> Any:
    held = vars(value)
    parts = {name: _rebuilt(part, done, paths) for name, part in held.items()}
    cls = _own_class(type(value)) if paths is None else _class(value, paths)
    if cls is type(value) and all(parts[name] is part for name, part in held.items()):
        return value
    made: Any = object.__new__(cls)
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


def _class(value: Any, paths: Mapping[int, Names]) -> type:
    """Return the class for a layer at these paths. Made once: JAX never forgets a class that was registered."""
    found = paths.get(id(value))
    if found is None or not is_layer(value):
        return type(value)
    cls = _own_class(type(value))
    attached: Names = getattr(type(value), _NAMES, ())
    key = cls, tuple({**dict(attached), **dict(found)}.items())
    if key not in _CLASSES:
        body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, _NAMES: key[1]}
        _CLASSES[key] = type(cls)(cls.__name__, (cls,), body)
    return _CLASSES[key]


def _own_class(cls: type) -> type:
    return cls.__mro__[1] if _NAMES in vars(cls) else cls
