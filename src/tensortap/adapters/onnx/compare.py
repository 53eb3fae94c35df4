"""Running a session for a comparison: there is nothing that a run could leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensortap.adapters.onnx.entry import call


@contextmanager
def untouched(model: Any, backward: bool) -> Iterator[Callable[[Any], None]]:
    """Gives a function that runs the session with a batch. Gradients are refused when they are asked for."""

    def run(batch: Any) -> None:
        call(model, batch)

    yield run
