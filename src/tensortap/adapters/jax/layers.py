"""The layers and parameters of a JAX model by their paths (attributes, lists, dicts), under every name they have."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import jax
import numpy as np

Kind = Literal["nnx", "equinox", "linen", "haiku", "tree"]
_BASES: Final[Mapping[str, Kind]] = {"flax.nnx": "nnx", "equinox": "equinox", "flax.linen": "linen", "haiku": "haiku"}
_DEPTH: Final = 64


class JaxLayer(NamedTuple):
    """A module that can be called, under one of its names."""

    path: str
    module: Any
    leaf: bool


def kind_of(model: Any) -> Kind | None:
    """Return the library of a module; "tree" for nested parameters, None for anything else."""
    for cls in type(model).__mro__:
        if cls.__name__ == "Module":
            home = cls.__module__.removeprefix("haiku._src.").split(".")
            found = _BASES.get(home[0]) or _BASES.get(".".join(home[:2]))
            if found:
                return found
    return "tree" if isinstance(model, (Mapping, list, tuple)) and _has_arrays(model) else None


def _has_arrays(tree: Any) -> bool:
    return any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(tree))


def layers_of(model: Any) -> list[JaxLayer]:
    """Return every callable module in a model, the model first, in the order of attributes.

    A shared module is listed once for each name; a module that contains itself is not entered again.
    """
    return list(_layers(model, "", ()))


def _layers(value: Any, path: str, above: tuple[int, ...]) -> Iterator[JaxLayer]:
    if id(value) in above or len(above) > _DEPTH:
        return
    inside = [layer for name, part in _parts(value) for layer in _layers(part, _join(path, name), (*above, id(value)))]
    if is_layer(value):
        yield JaxLayer(path, value, leaf=not inside)
    yield from inside


def paths_of(model: Any) -> dict[int, tuple[Any, tuple[str, ...]]]:
    """Return the callable modules in a model by id: the module, and every name it has."""
    found: dict[int, tuple[Any, tuple[str, ...]]] = {}
    for layer in layers_of(model):
        found[id(layer.module)] = (layer.module, (*found.get(id(layer.module), (None, ()))[1], layer.path))
    return found


def is_layer(value: Any) -> bool:
    """Return whether a value is a callable module of NNX or Equinox."""
    return kind_of(value) in ("nnx", "equinox") and callable(value)


def arrays_of(model: Any) -> list[tuple[str, Any]]:
    """Return every parameter of a model: an NNX variable, a float array of Equinox, a leaf of nested parameters."""
    return list(_arrays(model, "", ()))


def _arrays(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if is_parameter(value):
        yield path, value
    elif id(value) not in above and len(above) <= _DEPTH:
        for name, part in _parts(value):
            yield from _arrays(part, _join(path, name), (*above, id(value)))


def is_parameter(value: Any) -> bool:
    """Return whether a value is an `nnx.Param` or an array of floats."""
    if any(cls.__name__ == "Param" and cls.__module__.startswith("flax.nnx") for cls in type(value).__mro__):
        return True
    return isinstance(value, (jax.Array, np.ndarray)) and bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))


def value_of(parameter: Any) -> Any:
    """Return the array in a parameter."""
    return parameter if isinstance(parameter, (jax.Array, np.ndarray)) else parameter[...]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Return what a module or a container holds, by name."""
    if isinstance(value, Mapping) or _is_nnx(value, "Dict"):
        yield from ((dotted(str(name)), part) for name, part in value.items())
    elif isinstance(value, (list, tuple)) or _is_nnx(value, "List"):
        yield from ((str(i), part) for i, part in enumerate(value))
    elif kind_of(value) in ("nnx", "equinox"):
        yield from ((name, part) for name, part in vars(value).items() if not name.startswith("_"))


def dotted(name: str) -> str:
    """Return a path for one of Haiku's names.

    >>> dotted("mlp/~/linear_0")
    'mlp.linear_0'
    """
    return ".".join(part for part in name.split("/") if part not in ("", "~"))


def _is_nnx(value: Any, name: str) -> bool:
    nnx = sys.modules.get("flax.nnx")
    kind = getattr(nnx, name, None)
    return kind is not None and isinstance(value, kind)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
