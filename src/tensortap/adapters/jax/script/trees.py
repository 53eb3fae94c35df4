"""Arguments and results of a compiled function: their arrays by name, and which of them are the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from tensortap.adapters.jax.layers import arrays_of, kind_of, value_of

_PARAMETERS: Final = "params"
_MODELS: Final = ("params", "param", "model", "weights", "w", "theta", "variables", "net", "network", "module")
_OPTIMIZERS: Final = ("opt", "mu", "nu", "momentum")


class Leaf(NamedTuple):
    """An array and its name."""

    name: str
    value: Any


class ReturnedArgument(NamedTuple):
    """An argument that comes back with the same structure: parameters, their gradients, or the optimizer's state."""

    argument: str
    result: tuple[int | str, ...]  # where in the results


def named_arguments(signature: inspect.Signature | None, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name; by number where the signature does not say."""
    try:
        return dict(signature.bind(*args, **kwargs).arguments) if signature is not None else _numbered(args, kwargs)
    except TypeError:
        return _numbered(args, kwargs)


def _numbered(args: Any, kwargs: Any) -> dict[str, Any]:
    return {**{f"[{i}]": value for i, value in enumerate(args)}, **kwargs}


def leaves_of(value: Any) -> list[Leaf]:
    """Return the float arrays in a value, by path."""
    if kind_of(value) == "nnx":
        return [Leaf(name, value_of(p)) for name, p in arrays_of(value)]
    found = jax.tree_util.tree_flatten_with_path(value)[0]
    return [Leaf(".".join(map(_key, path)), leaf) for path, leaf in found if is_float_array(leaf)]


def parameters_of(value: Any) -> list[Leaf]:
    """Return the parameters in an argument: the entries under `params`, or all of it if there is no such name."""
    leaves = leaves_of(value)
    inside = [Leaf(name, leaf.value) for leaf in leaves if (name := _below(leaf.name)) is not None]
    return inside or leaves


def matches(arguments: dict[str, Any], results: Any) -> list[ReturnedArgument]:
    """Return the arguments that are returned with the same structure and shapes; the ones that look like a model come
    first.
    """
    found = []
    parts = [(path, _signature(part)) for path, part in _parts(results)]
    for name, value in arguments.items():
        own = _signature(value)
        found += [ReturnedArgument(name, path) for path, signature in parts if own is not None and signature == own][:1]
    return sorted(found, key=lambda match: _likeness(match.argument, arguments[match.argument]))


def part_at(results: Any, path: tuple[int | str, ...]) -> Any:
    """Return a part of the results."""
    for key in path:
        results = results[key]
    return results


def loss_in(results: Any) -> Any:
    """Return the loss among the results: the one of that name, or the first single float; None if there is none."""
    scalars = [
        (".".join(map(_key, path)), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(results)[0]
        if is_float_array(leaf) and is_array(leaf) and leaf.ndim == 0
    ]
    return next((leaf for name, leaf in scalars if "loss" in name.lower()), scalars[0][1] if scalars else None)


def is_float_array(value: Any) -> bool:
    """Return whether a value is an array of floats; a function may have taken its elements."""
    if isinstance(value, jax.core.Tracer) or not isinstance(value, (jax.Array, np.ndarray)):
        return False
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.floating))


def is_array(value: Any) -> bool:
    """Return whether a value is an array of numbers that can be read now."""
    if not isinstance(value, (jax.Array, np.ndarray)) or isinstance(value, jax.core.Tracer) or _is_gone(value):
        return False
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.number))


def _is_gone(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.is_deleted()


def _parts(results: Any, depth: int = 2) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    yield (), results
    items: Any = ()
    if type(results) in (tuple, list):
        items = enumerate(results)
    elif type(results) is dict:
        items = results.items()
    for key, part in items if depth else ():
        yield from (((key, *path), inner) for path, inner in _parts(part, depth - 1))


def _signature(value: Any) -> Any:
    """Return structure and shapes of a nested value with float arrays; None for anything else."""
    leaves, structure = jax.tree.flatten(value)
    shapes = tuple((leaf.shape, str(leaf.dtype)) if is_float_array(leaf) else None for leaf in leaves)
    return (structure, shapes) if any(map(is_float_array, leaves)) else None


def _likeness(name: str, value: Any) -> tuple[bool, bool, bool]:
    parts = jax.tree.leaves(value, is_leaf=lambda part: part is not value)
    optimizer = name.lower().startswith(_OPTIMIZERS) or any(type(p).__module__.startswith("optax") for p in parts[:4])
    return optimizer, len(jax.tree.leaves(value)) < 2, name.lower() not in _MODELS


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def _below(name: str) -> str | None:
    parts = name.split(".")
    return ".".join(parts[parts.index(_PARAMETERS) + 1 :]) if _PARAMETERS in parts[:-1] else None
