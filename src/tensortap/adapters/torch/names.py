"""Values that the user names with `tensortap.tap(x, "my/value")`: outputs of no module, and their gradients.

Names are known only when they turn up. A pattern that is to wait for one must have a slash in it (`"my/value"`,
`"my/value:grad_output"`, `"my/*"`); one without would be taken for a misspelt module. `"**"` finds named values too.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from tensortap.adapters.base import Port, Wanted
from tensortap.adapters.torch.gradients import Steps, await_outputs
from tensortap.adapters.torch.hooks import backward_task, count_call
from tensortap.adapters.torch.tensors import Taker, aside
from tensortap.adapters.torch.walk import tensors_in
from tensortap.sites import Candidate

PORTS: Final = ("output", "grad_output")
NO_VALUE: Final = "no value of this name was tapped"
UNLESS_COMPILED: Final = ", unless inside a region that torch.compile made"


class _Name(NamedTuple):
    output: Port | None
    gradient: Port | None


class NamedValues:
    """Sees the values that the user names."""

    def __init__(self, taker: Taker, steps: Steps, wanted: Wanted) -> None:
        self._taker = taker
        self._steps = steps
        self._wanted = wanted
        self._known: dict[str, _Name] = {}

    def see(self, name: str, value: Any) -> bool:
        """Record the tensors in a value and await their gradients. False when there is none."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._decide(name)
        found, recomputed = list(tensors_in(value)), backward_task() != -1
        step = self._steps.current()
        if known.output is not None and step.armed & known.output.bits:
            for slot, tensor in found:
                self._taker.take(known.output.point(slot), tensor, step, recomputed)
        if known.gradient is not None and step.armed & known.gradient.bits:
            call = count_call(step, known.gradient, recomputed)
            with aside():
                await_outputs(self._taker, self._steps, [known.gradient], found, step, call)
        return bool(found)

    def unseen(self, compiled: bool) -> dict[str, str]:
        """Patterns that could only mean named values, and found none."""
        why = NO_VALUE + (UNLESS_COMPILED if compiled else "")
        return {pattern.text: why for pattern in self._wanted.waiting(self._known, PORTS)}

    def _decide(self, name: str) -> _Name:
        candidate = Candidate(name, (), PORTS)
        return _Name(*(self._wanted.of_late(self._taker.recorder, candidate, port) for port in PORTS))
