"""Act when a watched step has a NaN or an infinity in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from tensortap.adapters.results import Origin, TensorSummary
from tensortap.errors import NonFiniteError, ProbeError
from tensortap.record.counters import Counters
from tensortap.record.recorder import OpenStep
from tensortap.record.step import summary_of
from tensortap.record.table import Names
from tensortap.select.ports import GRADIENT_PORTS

_BY_CALL: Final = (
    "tt.locate_nonfinite(model, step) names the operation and its line; step is a function that computes the loss of "
    "this batch and calls backward()"
)
OnNonFinite = Literal["record", "raise"] | Callable[[Origin], object] | None


class NonFiniteMonitor:
    """Find the origin of a step's first non-finite value, then warn, raise or call the user's function."""

    def __init__(self, action: OnNonFinite, counters: Counters, where: str = "") -> None:
        if not (action is None or action in ("record", "raise") or callable(action)):
            raise ProbeError(f"on_nonfinite= must be 'record', 'raise' or a function of the origin, got {action!r}")
        self.action = action
        self._where = where  # on which of several ranks this is
        self._counters = counters

    def look(self, step: OpenStep, names: Names, locates_backward: bool = False) -> Origin | None:
        """Return the origin of a step's first non-finite value, before the step closes; None where no action was given.

        Operations of backward are not watched, which would be expensive: where the framework can name them in a step of
        its own, the origin says by which call.
        """
        if self.action is None:
            return None
        step.table.wait()  # pending values are needed now
        found: Origin | None = step.origin
        if found is not None or not step.table.nonfinite:
            return found
        first = first_in(step, names)
        return replace(first, hint=_BY_CALL) if locates_backward and first.direction == "backward" else first

    def tell(self, origin: Origin, number: int) -> None:
        """Count the step, then call the user's function, warn or raise. Called after the step is stored."""
        self._counters.add("nonfinite_steps")
        if callable(self.action):
            try:
                self.action(origin)
            except Exception as error:
                self._counters.failed("callback_errors", "on_nonfinite", error)
            return
        text = f"step {number} is not finite{self._where}: {origin}"
        if self.action == "raise":
            raise NonFiniteError(text, origin)
        self._counters.warn("nonfinite", text)


def first_in(step: OpenStep, names: Names) -> Origin:
    """Return the first non-finite record of a step, with the inputs of its module if they were recorded too."""
    table = step.table
    bad = table.column("nan") + table.column("posinf") + table.column("neginf")
    row = int(np.flatnonzero(bad)[0])
    place, call = names.places[int(table.columns["key"][row])], int(table.columns["call"][row])
    given = [
        TensorSummary(names.places[int(key)].slot, summary_of(table, other))
        for other, key in enumerate(table.column("key"))
        if names.places[int(key)][:2] == (place.site, "input") and int(table.columns["call"][other]) == call
    ]
    backward = place.port in GRADIENT_PORTS
    return Origin(
        "backward" if backward else "forward",
        place.site,
        "",
        call=call,
        inputs=tuple(given),
        output=summary_of(table, row),
    )
