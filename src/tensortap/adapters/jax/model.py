"""A JAX model as an adapter knows it: its library, its layers and its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
import numpy as np

from tensortap.adapters.jax import layer_names
from tensortap.adapters.jax.layers import arrays_of, kind_of, layers_of, value_of
from tensortap.errors import UnsupportedError
from tensortap.select.ports import MODULE_PORTS
from tensortap.select.sites import Candidate

_PARAMETER_PORTS: Final = ("param", "grad")


class JaxModel:
    """What is known of a model before anything runs.

    `late`: its layers become known only while they run, as those of Linen and Haiku do.
    """

    def __init__(self, model: Any) -> None:
        self.kind = kind_of(model)
        self.cls = type(model)
        self.has_modules = self.kind in ("nnx", "equinox")
        self.late = not self.has_modules
        self.get: Callable[[], Any] = weakref.ref(model) if hasattr(model, "__weakref__") else lambda: model
        self.parameters = dict(arrays_of(model))
        self._layers = {layer.path: layer for layer in layers_of(model)}
        self._structure: Any = jax.tree.structure(model) if self.kind == "tree" else None

    def candidates(self) -> list[Candidate]:
        """Return every layer and every parameter."""
        layers = [
            Candidate(path, tuple(c.__name__ for c in type(layer.module).__mro__[:-1]), MODULE_PORTS, layer.leaf)
            for path, layer in self._layers.items()
        ]
        ports = _PARAMETER_PORTS if not self.late else _PARAMETER_PORTS[:1]
        return [*layers, *(Candidate(path, (type(p).__name__,), ports) for path, p in self.parameters.items())]

    def describe(self) -> dict[str, Any]:
        """Return the layers, and how many numbers each of them learns, for `run.json`."""
        return {
            "framework": "jax",
            "class": self.cls.__name__ if self.kind else "function",
            "library": self.kind or "function",
            "modules": [
                {"path": path, "type": type(layer.module).__name__, "parameters": _size(layer.module)}
                for path, layer in self._layers.items()
            ],
        }

    def parameters_in(self, arguments: Any) -> list[tuple[str, Any]]:
        """Return the model's parameters among the arguments of a traced step; its layers get their names there."""
        for value in jax.tree.leaves(arguments, is_leaf=self._is_model):
            if self._is_model(value):
                if self.kind == "nnx":
                    layer_names.add_names(value)  # `signature` removes them when the step is over
                return arrays_of(value)
        return []

    def refuse_constants(self, constants: Iterable[Any]) -> None:
        """Refuse a step that uses an NNX model that is not an argument: its first state would be compiled in as a
        constant.
        """
        own = {id(value_of(parameter)) for parameter in self.parameters.values()} if self.kind == "nnx" else set()
        if any(id(constant) in own for constant in constants):
            name = self.cls.__name__
            raise UnsupportedError(f"the step reads {name} without being given it; make it an argument: step(model, x)")

    def _is_model(self, value: Any) -> bool:
        if self.kind == "tree":
            return isinstance(value, self.cls) and bool(jax.tree.structure(value) == self._structure)
        return type(value) is self.cls and self.has_modules


def _size(module: Any) -> int:
    return sum(int(np.prod(value_of(p).shape)) for _, p in arrays_of(module))
