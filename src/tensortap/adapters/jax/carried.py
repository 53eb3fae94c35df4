"""Names that layers carry with them: a transformation inside a call builds layers anew, and they must be known again.

A module of NNX has its names in one more attribute, which splitting and merging keep; a module of Equinox has a class
of its own, a subclass that flattening keeps. Both are there only while a call or a step is traced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from tensortap.adapters.jax.layers import is_layer, kind_of, paths_of

_NAMES: Final = "_tensortap_names"
_NODES: Final = "_pytree__nodes"  # where NNX notes which attributes hold arrays
Names = tuple[tuple[type, tuple[str, ...]], ...]  # the class of a model, and the layer's paths in it

_CLASSES: Final[dict[tuple[type, Names], type]] = {}
_TOGETHER: Final[set[type]] = set()  # models that need their layers to be of one class, to stack them


def names(module: Any, root: type | None) -> tuple[str, ...]:
    """The paths that a module carries in a model of this class."""
    carried: Names = vars(module).get(_NAMES) or getattr(type(module), _NAMES, ())
    return next((paths for model, paths in carried if model is root), ())


@contextmanager
def carrying(model: Any) -> Iterator[Any]:
    """For the length of a call: a model whose layers carry their names."""
    if kind_of(model) != "nnx":
        yield _renamed(model)
        return
    mine = give(model)
    try:
        yield model
    finally:
        for module in mine:
            _take(module)


def failed(model: Any) -> None:
    """A call with renamed layers has failed: from now on they keep their class, in case it was for that."""
    if kind_of(model) == "equinox":
        _TOGETHER.add(_own_class(type(model)))


def give(model: Any) -> list[Any]:
    """Let the modules of a model of NNX carry their names; those that had none before."""
    root, mine = type(model), []
    for module, paths in paths_of(model).values():
        held: Names = vars(module).get(_NAMES, ())
        if root not in dict(held):
            vars(module)[_NAMES] = (*held, (root, paths))
            mine += [] if held else [module]
    return mine


def take(objects: Any) -> None:
    """Modules of NNX without the names again."""
    for each in objects:
        for _, module in sys.modules["flax.nnx"].iter_graph(each):
            if _NAMES in getattr(module, "__dict__", ()):
                _take(module)


def _take(module: Any) -> None:
    own = vars(module)
    own.pop(_NAMES, None)
    nodes = own.get(_NODES, {})
    if _NAMES in nodes:  # a merge has set the attribute, and NNX has noted that
        own[_NODES] = type(nodes)({name: data for name, data in nodes.items() if name != _NAMES})


def _renamed(model: Any) -> Any:
    """A model of Equinox with layers of classes of their own."""
    root = type(model)
    if root in _TOGETHER:
        return model
    paths = {identity: ((root, found),) for identity, (_, found) in paths_of(model).items() if found != ("",)}
    return _rebuilt(model, {}, paths)


def restored(value: Any) -> Any:
    """What a call has given, with layers of their first class."""
    return _rebuilt(value, {}, None)


def _rebuilt(value: Any, done: dict[int, Any], paths: Mapping[int, Names] | None) -> Any:
    """The same nested value with layers of other classes; what has none in it is the same object."""
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
    """The class for a layer at these places: made once, for JAX never forgets a class that it has been told of."""
    found = paths.get(id(value))
    if found is None or not is_layer(value):
        return type(value)
    cls = _own_class(type(value))
    carried: Names = getattr(type(value), _NAMES, ())
    key = cls, tuple({**dict(carried), **dict(found)}.items())
    if key not in _CLASSES:
        body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, _NAMES: key[1]}
        _CLASSES[key] = type(cls)(cls.__name__, (cls,), body)
    return _CLASSES[key]


def _own_class(cls: type) -> type:
    return cls.__mro__[1] if _NAMES in vars(cls) else cls
