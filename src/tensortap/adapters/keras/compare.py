"""Calling a model so that nothing of it is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensortap.adapters.keras.entry import call
from tensortap.adapters.keras.state import preserved
from tensortap.errors import UnsupportedError


@contextmanager
def untouched(model: Any, backward: bool) -> Iterator[Callable[[Any], Any]]:
    """Gives a function that calls the model with a batch."""
    if backward:
        raise UnsupportedError(
            "gradients of Keras models are compared by runs: watch both while they train, then tensortap.diff(a, b)"
        )
    with preserved(model):
        yield lambda batch: call(model, batch)
