"""Tell updates that arrive after the optimizer's step from those that never do.

With ZeRO-1 each rank updates its part of the parameters, and the rest is sent to it: at once, or in the next forward
pass, just before it is used (Megatron's `--overlap-param-gather`). Then every rank's update is zero where another one
has changed the parameter when the optimizer's step ends. That is right where ranks have equal parameters when the next
step ends and the module has computed the right values with them, and wrong where not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tensortap.diff.cause import Cause, first_cause, port_of
from tensortap.diff.elements import CommonElements
from tensortap.diff.pair import Pair
from tensortap.select.ports import module_of

NOTE: Final = "zero where another rank has changed it: not sent, or too late"
_ARRIVED: Final = "sent after the optimizer's step, and there in time"


def joined_parts(kept: Sequence[CommonElements | None]) -> CommonElements | None:
    """Return the whole update where each element was changed on one rank at most; None where several changed one."""
    parts = [common for common in kept if common is not None]
    if len(parts) < len(kept) or len({common.b.size for common in parts}) != 1:
        return None
    changed = sum((common.b != 0).astype(np.int64) for common in parts)
    if np.max(changed, initial=0) > 1:
        return None
    whole = np.sum([common.b.astype(np.float64) for common in parts], axis=0)
    return CommonElements(parts[0].kind, parts[0].a, whole)


class DelayedUpdates:
    """Hold the pairs of a step back until those of the next one show whether its updates arrived in time."""

    def __init__(self) -> None:
        self._held: list[Pair] | None = None
        self._arrived: set[str] = set()  # sites whose update came later in an earlier step

    def step(self, pairs: list[Pair]) -> list[Pair]:
        """Take the pairs of a step; return those of the step before."""
        before, self._held = self._held, pairs
        if before is None:
            return []
        waiting = {pair.site for pair in before if _is_waiting(pair)}
        if waiting:
            # Copies that are equal are compared once. What is sent is equal to the last bit.
            copies = Counter(pair.site for pair in pairs if port_of(pair.site) == "param" and not pair.call)
            apart = {site for site, count in copies.items() if count > 1}
            missed = {site for site in waiting if _is_missed(site, apart, first_cause(pairs))}
            self._arrived = (self._arrived | waiting) - missed
        return self._judged(before)

    def rest(self) -> list[Pair]:
        """Return the pairs of the last step; what came later before is taken to do so again."""
        last, self._held = self._held, None
        return self._judged(last or [])

    def _judged(self, pairs: list[Pair]) -> list[Pair]:
        return [
            replace(pair, error=0.0, excess=0.0, note=_ARRIVED)
            if _is_waiting(pair) and pair.site in self._arrived
            else pair
            for pair in pairs
        ]


def _is_waiting(pair: Pair) -> bool:
    return pair.note == NOTE and pair.differs


def _is_missed(site: str, apart: set[str], cause: Cause | None) -> bool:
    """Return whether ranks have other parameters in the next step, or had when its module or the one around it ran."""
    path = site.rpartition(":")[0]
    if f"{path}:param" in apart:
        return True
    if cause is None or cause.kind != "forward":
        return False
    module = module_of(path, "param")
    return module == cause.module or module.startswith(f"{cause.module}.") or not cause.module
