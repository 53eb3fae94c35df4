"""Running a session with whatever a user has at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def call(session: Any, inputs: Any) -> list[Any]:
    """Run a session with a feed, a tuple of values in the order of its inputs, or one value."""
    if not isinstance(inputs, Mapping):
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        inputs = dict(zip((given.name for given in session.get_inputs()), values, strict=True))
    return session.run(None, dict(inputs))  # type: ignore[no-any-return]


def as_step(session: Any, batch: Any) -> Callable[[], Any]:
    """The user's own function of a step, or a run of the session."""
    return batch if callable(batch) else lambda: call(session, batch)
