"""The adapter of a rank that does not record: it touches no model, and every call on its tap does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensortap.adapters.protocol import Clock, Plan
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.sites import Candidate


class NullAdapter:
    """Stands in for the adapter that the other ranks have. A watched function is called as it is."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.call = function

    def candidates(self) -> list[Candidate]:
        """Nothing is tapped here."""
        return []

    def untappable(self) -> dict[str, str]:
        """Nothing was asked for."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Nothing to write."""
        return {}

    def attach(self, recorder: Recorder, plan: Plan, clock: Clock) -> None:
        """Put nothing on."""
        self._recorder = recorder

    def arm(self) -> None:
        """A step has opened."""

    def detach(self) -> None:
        """There is nothing to take off."""

    def current(self) -> OpenStep:
        """The one step that there is."""
        return self._recorder.current

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Threads' own steps are not recorded either."""
        return None

    def closing(self, step: OpenStep) -> None:
        """A step is over."""

    def left_open(self) -> list[OpenStep]:
        """No thread has begun anything."""
        return []

    def named(self, name: str, value: Any) -> bool:
        """TensorSummary, and let go."""
        return True

    def unseen(self) -> dict[str, str]:
        """Nothing was wanted."""
        return {}
