"""The name a script gives to a model, and whether it has other models."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Final

from torch import nn

_MOST_HELD: Final = 64  # of a list or dict: a script's optimizers are few


def has_parameters(module: nn.Module) -> bool:
    """Return whether the module has parameters."""
    return next(module.parameters(), None) is not None


def has_other_models(root: nn.Module) -> bool:
    """Return whether the process has another model: with parameters, neither inside this one nor around it."""
    everything = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    parents: dict[int, list[nn.Module]] = {}
    for module in everything:
        for child in module.__dict__.get("_modules", {}).values():
            parents.setdefault(id(child), []).append(module)
    related = {id(module) for module in root.modules()}
    todo = [root]
    while todo:
        above = [parent for parent in parents.get(id(todo.pop()), ()) if id(parent) not in related]
        related.update(map(id, above))
        todo += above
    return any(id(module) not in related and _own_parameters(module) for module in everything)


def _own_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module.__dict__.get("_parameters", {}).values())


def name_of(module: nn.Module, frame: FrameType | None) -> str:
    """Return the outermost variable or attribute that holds the module; else its class."""
    for scope in _scopes(frame):
        for name, value in scope.items():
            if value is module and name != "self":
                return name
        for name, value in _attributes(scope.get("self")):
            if value is module:
                return name
    return type(module).__name__


def held_by_variables(frame: FrameType | None) -> set[int]:
    """Return the ids of what variables and attributes hold, also inside lists, tuples and dicts."""
    held: set[int] = set()
    for scope in _scopes(frame):
        for _, value in (*scope.items(), *_attributes(scope.get("self"))):
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            held.update((id(value), *map(id, itertools.islice(inside, _MOST_HELD))))
    return held


def _scopes(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    """Yield the script's global names, then the local ones of the calling functions from outside in."""
    yield vars(sys.modules["__main__"])
    frames = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "tensortap"):
            frames.append(frame)
        frame = frame.f_back
    for outer in reversed(frames):
        yield dict(outer.f_locals)


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    held = getattr(owner, "__dict__", {})
    yield from held.items()
    yield from held.get("_modules", {}).items() if isinstance(owner, nn.Module) else ()
