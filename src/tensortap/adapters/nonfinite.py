"""What happens when a watched step has a NaN or an infinity in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from tensortap.adapters.results import Origin, TensorSummary
from tensortap.errors import NonFiniteError, ProbeError
from tensortap.record.counters import Counters
from tensortap.record.recorder import OpenStep
from tensortap.record.step import summary_of
from tensortap.record.table import Names
from tensortap.select.ports import GRADIENT_PORTS

OnNonFinite = Literal["record", "raise"] | Callable[[Origin], object] | None


class NonFiniteMonitor:
    """Finds the origin of a step's first non-finite value and does with it what the user wants."""

    def __init__(self, action: OnNonFinite, counters: Counters, where: str = "") -> None:
        if not (action is None or action in ("record", "raise") or callable(action)):
            raise ProbeError(f"on_nonfinite={action!r} is neither 'record' nor 'raise' nor a function of the origin")
        self.action = action
        self._where = where  # on which of several ranks this is
        self._counters = counters

    def look(self, step: OpenStep, names: Names) -> Origin | None:
        """Before a step closes: where its first non-finite value was born, if it has one and somebody wants to know."""
        if self.action is None:
            return None
        step.table.wait()  # pending values are needed now
        found: Origin | None = step.origin
        return first_in(step, names) if found is None and step.table.nonfinite else found

    def tell(self, origin: Origin, number: int) -> None:
        """After the step is safe: count it, say it, and raise or call."""
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
    """The first non-finite record of a step, with what its module was given where that was recorded too."""
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
