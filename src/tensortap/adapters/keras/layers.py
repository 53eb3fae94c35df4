"""The layers of a Keras model and their variables, each under every name it has.

In a functional or sequential model a layer goes by its name, as `model.get_layer` knows it; elsewhere by the attribute
that holds it, as `layer.path` has automatic names and is empty before the model is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import keras

_DEPTH: Final = 6
# What Keras itself keeps in a layer besides the user's attributes.
_OWN: Final = frozenset(
    (
        "_layers", "_tracker", "_tracked", "_metrics", "_losses", "_loss_ids", "_functional", "_inbound_nodes",
        "_outbound_nodes", "_nodes", "_operations", "_nodes_by_depth", "_operations_by_depth", "_losses_override",
        "_seed_generators", "_trainable_variables", "_non_trainable_variables", "_build_shapes_dict", "_auto_config",
        "optimizer", "loss", "_compile_loss", "_compile_metrics", "_compile_config", "_loss_tracker", "_parameters",
        "_modules",
    )
)  # fmt: skip


class KerasLayer(NamedTuple):
    """One name of one layer, or of one operation in a functional model."""

    path: str
    value: Any
    leaf: bool


class KerasVariable(NamedTuple):
    """One name of one variable."""

    path: str
    value: Any
    trainable: bool


def layers_of(model: Any) -> list[KerasLayer]:
    """Return the model and everything in it that is called, in the order in which it was made."""
    return list(_walk("", model, frozenset()))


def variables_of(layers: list[KerasLayer]) -> list[KerasVariable]:
    """Return the layers' own variables; a layer that is not built has none."""
    found: dict[str, KerasVariable] = {}
    for layer in layers:
        for variable in _own_variables(layer.value):
            path = _free(joined(layer.path, variable.name), found)
            found[path] = KerasVariable(path, variable, bool(variable.trainable))
    return list(found.values())


def joined(path: str, name: str) -> str:
    """Return a path with one name more.

    >>> joined("", "dense"), joined("encoder", "dense")
    ('dense', 'encoder.dense')
    """
    return f"{path}.{name}" if path else name


def _walk(path: str, layer: Any, above: frozenset[int]) -> Iterator[KerasLayer]:
    inside = [] if id(layer) in above else _children(layer)
    yield KerasLayer(path, layer, not inside)
    for name, child in inside:
        yield from _walk(joined(path, name), child, above | {id(layer)})


def _children(layer: Any) -> list[tuple[str, Any]]:
    if isinstance(layer, keras.Sequential):
        found = [(child.name, child) for child in layer.layers]
    elif isinstance(getattr(layer, "operations", None), list):  # a functional model, and a subclass of one
        found = [(op.name, op) for op in layer.operations]
    else:
        found = []
    attributes = {**vars(layer), **vars(layer).get("_modules", {})}  # where a module of PyTorch keeps its layers
    held = [pair for name, value in attributes.items() if name not in _OWN for pair in _held(name, value, _DEPTH)]
    known = {id(child) for _, child in found}
    found += [(name, child) for name, child in held if id(child) not in known]
    known |= {id(child) for _, child in found}
    found += [(each.name, each) for each in getattr(layer, "_layers", None) or () if id(each) not in known]
    return [(name, child) for name, child in found if not isinstance(child, keras.layers.InputLayer)]  # never called


def _held(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.Layer):
        yield name, value
    elif depth and not name.startswith("_self_"):
        if isinstance(value, Mapping):
            parts = [(str(key), item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            parts = [(str(i), item) for i, item in enumerate(value)]
        else:
            return
        for key, item in parts:
            yield from _held(f"{name}.{key}", item, depth - 1)


def _own_variables(layer: Any) -> list[Any]:
    return [*getattr(layer, "_trainable_variables", ()), *getattr(layer, "_non_trainable_variables", ())]


def _free(path: str, taken: Mapping[str, Any]) -> str:
    """Return the path, with a number appended if a layer uses one name twice."""
    number, free = 0, path
    while free in taken:
        number += 1
        free = f"{path}_{number}"
    return free
