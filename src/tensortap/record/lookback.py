"""Look-back: keep the last steps that no trigger wanted in memory, in case a later trigger wants them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.record.counters import Counters
from tensortap.record.step import Step
from tensortap.record.table import StepTable


class Split(NamedTuple):
    """A closed step's rows: to be written now, to be held for a later trigger, written now with tensors held."""

    now: StepTable | None
    later: StepTable | None
    tensors_later: StepTable | None


def split(table: StepTable, fired: int, waiting: int) -> Split:
    """Split a table by the probes that want it now (`fired`) and those that may want it later (`waiting`)."""
    if not table.rows:
        return Split(None, None, None)
    probes = table.column("probes")
    wanted = _any(probes, fired)
    if not waiting:
        return Split(_rows(table, wanted), None, None)
    later = ~wanted & _any(probes, waiting)
    return Split(_rows(table, wanted), _rows(table, later), _tensors_later(table, wanted, waiting))


def _tensors_later(table: StepTable, wanted: npt.NDArray[np.bool_], waiting: int) -> StepTable | None:
    """Return a copy of the rows that are written now and whose tensors a later trigger may want."""
    rows = sorted({kept.row for kept in table.tensors if kept.probe & waiting and wanted[kept.row]})
    if not rows:
        return None
    copy = table.take(np.array(rows))
    copy.tensors = [kept for kept in copy.tensors if kept.probe & waiting]
    copy.values = []
    return copy


def _any(probes: npt.NDArray[Any], mask: int) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (probes & np.uint64(mask)) != 0
    return found


def _rows(table: StepTable, chosen: npt.NDArray[np.bool_]) -> StepTable | None:
    if chosen.all():
        return table
    return table.take(np.flatnonzero(chosen)) if chosen.any() else None


class _HeldStep(NamedTuple):
    step: Step
    waiting: int


class LookBack:
    """Hold the unwritten rows of the last `steps` steps, within `most_bytes`.

    Kept tensors count like rows. When the bytes run out the oldest step is dropped, and counted in
    `lookback_let_go_steps`.
    """

    def __init__(self, steps: int, most_bytes: int, counters: Counters) -> None:
        self.steps = steps
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._counters = counters
        self._held: deque[_HeldStep] = deque()

    def __len__(self) -> int:
        return len({held.step.number for held in self._held})

    def hold(self, step: Step, waiting: int) -> None:
        """Hold a step's rows for the probes that may want them later."""
        self._held.append(_HeldStep(step, waiting))
        self.nbytes += step.nbytes
        while self._held and self.nbytes > self.most_bytes:
            gone = self._held.popleft().step
            self.nbytes -= gone.nbytes
            if all(held.step.number != gone.number for held in self._held):  # a step may be held twice
                self._counters.add("lookback_let_go_steps")

    def expire(self, number: int) -> list[StepTable]:
        """Drop what is more than `steps` before step `number`; return the tables, to be used again."""
        old = [held for held in self._held if held.step.number < number - self.steps]
        if old:  # steps that were open at once may have closed in any order
            self._held = deque(held for held in self._held if held.step.number >= number - self.steps)
            self.nbytes -= sum(held.step.nbytes for held in old)
        return [held.step.table for held in old]

    def release(self, fired: int) -> Iterator[tuple[Step, int]]:
        """Yield the held steps that the fired probes want, oldest first, with the probes that still wait for them."""
        held, self._held, self.nbytes = sorted(self._held, key=lambda held: held.step.number), deque(), 0
        for step, waiting in held:
            rest = waiting & ~fired
            parts = split(step.table, fired & waiting, rest)
            for table, written in ((parts.later, step.tensors_only), (parts.tensors_later, True)):
                if table is not None:
                    self.hold(replace(step, table=table, tensors_only=written), rest)
            if parts.now is not None:
                yield replace(step, table=parts.now), rest
