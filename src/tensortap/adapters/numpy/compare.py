"""Calling an object so that nothing of it is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensortap.adapters.numpy.entry import call
from tensortap.adapters.numpy.state import preserved


@contextmanager
def untouched(model: Any, backward: bool) -> Iterator[Callable[[Any], None]]:
    """Gives a function that calls the object with a batch. There is no backward: asking for gradients is refused."""
    with preserved(model):
        yield lambda batch: call(model, batch)
