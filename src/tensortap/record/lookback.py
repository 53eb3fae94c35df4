"""The look-back ring: the last steps nobody wanted yet, in memory, until a trigger wants them after all."""

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
    """A closed step's rows: to be written now, waiting for a later trigger, and written but with tensors waiting."""

    kept: StepTable | None
    held: StepTable | None
    pending: StepTable | None


def split(table: StepTable, fired: int, waiting: int) -> Split:
    """Shard a table by the probes that want it now (`fired`) and those that may want it later (`waiting`)."""
    if not table.rows:
        return Split(None, None, None)
    probes = table.column("probes")
    wanted = _any(probes, fired)
    if not waiting:
        return Split(_part(table, wanted), None, None)
    held = ~wanted & _any(probes, waiting)
    return Split(_part(table, wanted), _part(table, held), _pending(table, wanted, waiting))


def _pending(table: StepTable, wanted: npt.NDArray[np.bool_], waiting: int) -> StepTable | None:
    """A copy of the wanted rows of which somebody may want tensors later; the rows themselves are written now."""
    rows = sorted({kept.row for kept in table.tensors if kept.probe & waiting and wanted[kept.row]})
    if not rows:
        return None
    late = table.take(np.array(rows))
    late.tensors = [kept for kept in late.tensors if kept.probe & waiting]
    late.values = []
    return late


def _any(probes: npt.NDArray[Any], mask: int) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (probes & np.uint64(mask)) != 0
    return found


def _part(table: StepTable, chosen: npt.NDArray[np.bool_]) -> StepTable | None:
    if chosen.all():
        return table
    return table.take(np.flatnonzero(chosen)) if chosen.any() else None


class _Held(NamedTuple):
    step: Step
    waiting: int


class LookBack:
    """Holds what the last `steps` steps left unwritten, within `most_bytes`; what must be let go is counted.

    Kept tensors count like rows. Bytes run out oldest first.
    """

    def __init__(self, steps: int, most_bytes: int, counters: Counters) -> None:
        self.steps = steps
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._counters = counters
        self._held: deque[_Held] = deque()

    def __len__(self) -> int:
        return len({held.step.number for held in self._held})

    def hold(self, step: Step, waiting: int) -> None:
        """Remember a step's rows for the probes that may want them later."""
        self._held.append(_Held(step, waiting))
        self.nbytes += step.nbytes
        while self._held and self.nbytes > self.most_bytes:
            gone = self._held.popleft().step
            self.nbytes -= gone.nbytes
            if all(held.step.number != gone.number for held in self._held):  # a step may be held in two parts
                self._counters.add("lookback_let_go_steps")

    def expire(self, number: int) -> list[StepTable]:
        """Let go of what lies further back than promised before step `number`; its memory can be used again."""
        old = [held for held in self._held if held.step.number < number - self.steps]
        if old:  # steps that were open at once may have closed in any order
            self._held = deque(held for held in self._held if held.step.number >= number - self.steps)
            self.nbytes -= sum(held.step.nbytes for held in old)
        return [held.step.table for held in old]

    def release(self, fired: int) -> Iterator[tuple[Step, int]]:
        """The held steps that the fired probes want, oldest first, with the probes that go on waiting for them."""
        held, self._held, self.nbytes = sorted(self._held, key=lambda held: held.step.number), deque(), 0
        for step, waiting in held:
            rest = waiting & ~fired
            part = split(step.table, fired & waiting, rest)
            for table, written in ((part.held, step.tensors_only), (part.pending, True)):
                if table is not None:
                    self.hold(replace(step, table=table, tensors_only=written), rest)
            if part.kept is not None:
                yield replace(step, table=part.kept), rest
