"""Calling a model with whatever a user has at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def call(model: Any, inputs: Any) -> Any:
    """Call a model with one value, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def as_step(model: Any, batch: Any) -> Callable[[], Any]:
    """The user's own function of a step, or a call of the model."""
    return batch if callable(batch) else lambda: call(model, batch)
