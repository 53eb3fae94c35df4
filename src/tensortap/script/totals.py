"""Totals of a run, counted while it is written, so that the closing lines need not read it again."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tensortap.record.step import Step
from tensortap.reduce.statistics import NONFINITE


class Totals:
    """A sink that counts steps and records, and keeps the first non-finite site and the losses."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()  # those with records, by phase
        self.records = 0
        self.first_bad: tuple[int, str] | None = None
        self.losses: dict[str, list[float]] = {}  # of training, by name: the first and the last

    def write(self, step: Step) -> None:
        """Count one step."""
        if step.tensors_only:
            return
        self.steps[step.phase] += step.table.rows > 0
        self.records += step.table.rows
        if step.table.nonfinite and (self.first_bad is None or step.number < self.first_bad[0]):
            self.first_bad = (step.number, _first_bad_place(step))
        for name in step.metrics:
            if name.startswith("loss") and step.phase in ("", "train"):
                self.losses.setdefault(name, [])[1:] = [step.metrics[name]]

    def close(self) -> None:
        """Do nothing: no step is held back."""

    def __str__(self) -> str:
        return "the totals"


def _first_bad_place(step: Step) -> str:
    columns = step.table.columns
    bad = np.flatnonzero(sum(columns[name][: step.table.rows] for name in NONFINITE))
    return str(step.place(int(bad[0]))) if len(bad) else ""
