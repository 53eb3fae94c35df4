"""Calling an object with whatever a user has at hand, by the method that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tensortap.errors import UnsupportedError

_WAYS: Final = ("__call__", "forward", "predict", "transform")


def call(model: Any, inputs: Any) -> Any:
    """Call an object with one value, a tuple of arguments or a dict of keyword arguments."""
    method = method_of(model)
    if isinstance(inputs, Mapping):
        return method(**inputs)
    return method(*inputs) if isinstance(inputs, tuple) else method(inputs)


def as_step(model: Any, batch: Any) -> Callable[[], Any]:
    """The user's own function of a step, or a call of the object."""
    return batch if callable(batch) else lambda: call(model, batch)


def method_of(model: Any) -> Callable[..., Any]:
    """How an object is called.

    >>> method_of(print)("x")
    x
    """
    for name in _WAYS:
        if hasattr(model, name):
            return getattr(model, name)  # type: ignore[no-any-return]
    raise UnsupportedError(
        f"it is not known how a {type(model).__name__} is called: it has none of {', '.join(_WAYS)}. "
        "Watch it, call it yourself, and close each step with tap.step()"
    )
