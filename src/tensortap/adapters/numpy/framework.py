"""NumPy-style objects and scikit-learn as one object: called by whichever method they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tensortap.adapters.array_framework import ArrayFramework, Restore
from tensortap.adapters.arrays import Array
from tensortap.adapters.nested import call_with
from tensortap.adapters.numpy.adapter import NumpyAdapter
from tensortap.adapters.numpy.capabilities import CAPABILITIES
from tensortap.adapters.numpy.layers import has_layers, layers_of
from tensortap.adapters.numpy.state import preserved
from tensortap.errors import UnsupportedError

_WAYS: Final = ("__call__", "forward", "predict", "transform")


class NumpyFramework(ArrayFramework):
    """Objects whose layers are callables that take and return arrays."""

    capabilities = CAPABILITIES

    def recognizes(self, value: Any) -> bool:
        """Return whether an object has layers that can be called."""
        return has_layers(value)

    def array_adapter(self, model: Any) -> NumpyAdapter | None:
        """Return the adapter for an object, or None when there is nothing in it to call."""
        return NumpyAdapter(model) if has_layers(model) else None

    def call(self, model: Any, inputs: Any) -> Any:
        """Call an object by the method it has."""
        return call_with(method_of(model), inputs)

    @contextmanager
    def preserved(self, model: Any) -> Iterator[Restore]:
        """Put attributes, arrays and random states back."""
        with preserved(model) as restore:
            yield restore

    def state(self, model: Any) -> dict[str, Array]:
        """Return all arrays that layers hold."""
        return {f"array {found.path}": found.value.copy() for found in layers_of(model).arrays}

    def traces(self, model: Any) -> dict[str, Any]:
        """Return the classes of all layers with what they define, and every slot."""
        found = layers_of(model)
        classes = {cls for layer in found.layers for cls in type(layer.value).__mro__ if cls is not object}
        entries = {f"class {cls.__qualname__}.{name}": id(v) for cls in classes for name, v in list(vars(cls).items())}
        slots = {f"slot {f.path}": id(f.holder.get()) for f in found.functions if f.holder is not None}
        return entries | slots | {f"type of {layer.path}": type(layer.value) for layer in found.layers}


def method_of(model: Any) -> Callable[..., Any]:
    """Return how an object is called.

    >>> method_of(print)("x")
    x
    """
    for name in _WAYS:
        if hasattr(model, name):
            return getattr(model, name)  # type: ignore[no-any-return]
    raise UnsupportedError(
        f"a NumPy-style model must have one of the methods {', '.join(_WAYS)} to be called, got an object of type "
        f"{type(model).__name__} with none of them: watch it, call it yourself, and close each step with tap.step()"
    )


FRAMEWORK: Final = NumpyFramework()
