"""Decide what becomes of a closed step's rows: written now, held for look-back, or dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.record.lookback import LookBack, split
from tensortap.record.step import Step, summary_of
from tensortap.record.table import Names, StepTable, Value
from tensortap.select.probes import Probe

NO_ROWS: Final = StepTable(1)  # the table of every step of which no row is kept


class StepDecision:
    """Split a closed step by the probes that fired, and finish the rows that are written now.

    `reuse` takes back tables that nobody needs any more.
    """

    def __init__(
        self, probes: Sequence[Probe], names: Names, lookback: LookBack, reuse: Callable[[StepTable], None]
    ) -> None:
        self._all_probes = (1 << len(probes)) - 1
        self._lookback = lookback
        self._reuse = reuse
        self._rows = _RowFinisher(probes, names)

    def decide(self, step: Step, armed: int, maybe: int, reasons: Mapping[int, str]) -> list[Step]:
        """Return what is to be written now, oldest first: look-back steps, then this one.

        `armed` are the probes that its rows are of, `maybe` those of them that could not say before the step whether
        they want it; `reasons` has those that do.
        """
        fired = 0
        for i in reasons:
            fired |= 1 << i
        all_wanted = fired == self._all_probes or not (maybe or armed & ~fired)
        if all_wanted and fired and not self._lookback.steps and step.table.rows:
            self._rows.finish_rows(step, fired, 0, reasons)
            return [step]
        for table in self._lookback.expire(step.number):
            self._reuse(table)
        waiting = maybe & ~fired if self._lookback.steps else 0
        earlier = list(self._lookback.release(fired & maybe)) if fired & maybe else []
        table = self._split(step, fired, waiting)
        now = step if table is step.table else replace(step, table=table)
        for old, others in earlier:
            self._rows.finish(old, fired & maybe, others, reasons, "lookback: ")
        self._rows.finish(now, fired, waiting, reasons)
        return [*(old for old, _ in earlier), now]

    def _split(self, step: Step, fired: int, waiting: int) -> StepTable:
        """Return the rows to write now; hold those that a later trigger may want."""
        if fired == self._all_probes and step.table.rows:
            return step.table
        parts = split(step.table, fired, waiting)
        for table, written in ((parts.later, False), (parts.tensors_later, True)):
            if table is not None:
                # The step's metrics are written now, whatever becomes of its rows.
                self._lookback.hold(replace(step, table=table, tensors_only=written, metrics={}, labels={}), waiting)
        if step.table not in parts:
            self._reuse(step.table)
        return parts.now or NO_ROWS


class _RowFinisher:
    """Fill in what is known only when a step closes: its number and phase, names, and why each row is kept."""

    def __init__(self, probes: Sequence[Probe], names: Names) -> None:
        self._names = names
        self._all_probes = (1 << len(probes)) - 1
        self._quantiles = [(1 << i, probe.quantiles) for i, probe in enumerate(probes) if probe.quantiles]

    def finish(self, step: Step, fired: int, waiting: int, reasons: Mapping[int, str], prefix: str = "") -> None:
        if step.table.rows:
            self.finish_rows(step, fired, waiting, reasons, prefix)

    def finish_rows(self, step: Step, fired: int, waiting: int, reasons: Mapping[int, str], prefix: str = "") -> None:
        table = step.table
        filled = (fired, step.phase, prefix, reasons)
        table.same = table.settle(step.number) and table.filled == filled  # mostly they are
        if not table.same:
            table.filled = filled
            self._fill(step, fired, reasons, prefix)
        if table.tensors and fired != self._all_probes:
            table.tensors = [kept for kept in table.tensors if kept.probe & fired]
        # A row is written once, so numbers that only a later trigger may want are written with it.
        if table.values:
            table.values = [value for value in table.values if value.probe & (fired | waiting)]
        if not self._quantiles:
            return
        if table.pending:
            table.when_copied.append(functools.partial(self._add_quantiles, table, fired))
        else:
            self._add_quantiles(table, fired)

    def _fill(self, step: Step, fired: int, reasons: Mapping[int, str], prefix: str) -> None:
        table = step.table
        rows = slice(table.rows)
        table.columns["phase"][rows] = self._names.phase(step.phase)
        self._names.fill(table)
        table.columns["reason"][rows] = self._reasons(table.column("probes") & np.uint64(fired), reasons, prefix)

    def _reasons(self, probes: npt.NDArray[Any], reasons: Mapping[int, str], prefix: str) -> npt.NDArray[Any] | int:
        """Return the number of each row's reason, or the one that they share."""
        alike = bool((probes == probes[0]).all())
        masks, which = ([probes[0]], 0) if alike else np.unique(probes, return_inverse=True)
        texts = ["; ".join(dict.fromkeys(r for i, r in reasons.items() if int(mask) >> i & 1)) for mask in masks]
        numbers = np.array([self._names.reason(prefix + text) for text in texts], np.int32)
        return numbers[which]

    def _add_quantiles(self, table: StepTable, fired: int) -> None:
        for bit, wanted in self._quantiles:
            if not bit & fired:
                continue
            for row in np.flatnonzero(table.column("probes") & np.uint64(bit)).tolist():
                summary = summary_of(table, row)
                table.values.extend(Value(row, f"q{q:g}", summary.quantile(q), bit) for q in wanted)
