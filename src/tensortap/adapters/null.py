"""Adapters that touch no model: for `watch()` without one, and for a rank that does not record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensortap.adapters.plan import Plan
from tensortap.adapters.protocol import Adapter
from tensortap.adapters.steps import StepDetector, ThreadState
from tensortap.errors import PatternError, UnsupportedError
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.probes import Probe
from tensortap.select.sites import Candidate, Pattern


class NullAdapter(Adapter):
    """Serve `watch()` without a model: only values that the user names are recorded."""

    names_only = True

    def default_sites(self) -> str | Callable[[Candidate], bool]:
        """Return the pattern that matches every name."""
        return "**"

    def refuse(self, pattern: Pattern) -> None:
        """Refuse patterns of operations: without a model there is no code to observe."""
        if pattern.kind == "op" and pattern.operation is not None:
            raise PatternError(
                f"{pattern.text!r}: there is no model to see operations of. Write ops({pattern.operation.text!r})"
            )

    def plan(self, probes: Sequence[Probe]) -> Plan:
        """Return an empty plan: names are known only when values are given."""
        for pattern in (pattern for probe in probes for pattern in probe.patterns):
            self.refuse(pattern)
        return Plan({}, tuple(probes))

    def attach(self, recorder: Recorder, plan: Plan) -> None:
        """Put nothing on."""
        self.steps = StepDetector(recorder, ThreadState)

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Refuse: without a model no thread has steps of its own."""
        raise UnsupportedError("span() needs a model: tensortap.watch(model)")


class IdleAdapter(NullAdapter):
    """Serve a rank that does not record: every call on its tap works and does nothing. A function is just called."""

    names_only = False

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.function = function

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Do nothing: threads' own steps are not recorded either."""
        return None

    def named(self, name: str, value: Any) -> bool:
        """Ignore every value."""
        return True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that the other ranks watch."""
        return super().call(*args, **kwargs) if self.function is None else self.function(*args, **kwargs)
