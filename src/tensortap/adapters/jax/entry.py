"""Calling a model with whatever a user has at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensortap.adapters.jax.layers import kind_of


def call(model: Any, inputs: Any) -> Any:
    """Call a model with one argument, a tuple of them, or keyword arguments; one of Linen by its `apply`."""
    function = model.apply if kind_of(model) == "linen" else model
    if isinstance(inputs, Mapping):
        return function(**inputs)
    return function(*inputs) if isinstance(inputs, tuple) else function(inputs)


def as_step(model: Any, batch: Any) -> Callable[[], Any]:
    """The user's own function of a step, or a call of the model."""
    return batch if callable(batch) else lambda: call(model, batch)
