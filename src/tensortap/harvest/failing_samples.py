"""Run a batch so that a sample the model raises on, or dies in, costs that sample and nothing else."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tensortap.errors import HarvestError, TensortapError
from tensortap.harvest.batch import InputBatch
from tensortap.harvest.crash_notes import TRIES, CrashNotes
from tensortap.harvest.job import BatchForward, KeepError
from tensortap.harvest.rows import KeptRows

MOST_FAILING: Final = 8  # batches of one sample that may fail one after another before it is the model's fault
SetAside = list[dict[str, Any]]  # samples that were left out, each with the reason
SiteRows = list[tuple[str, KeptRows]]


class FaultTolerantForward:
    """Run batches; samples that cannot be run are named in `set_aside`, and left out."""

    def __init__(self, forward: BatchForward) -> None:
        self._forward = forward
        self._failing = 0  # batches in a row of which nothing was left

    def __call__(self, batch: InputBatch, notes: CrashNotes, set_aside: SetAside) -> tuple[InputBatch | None, SiteRows]:
        """Return the samples that could be run, None where there are none, and their rows."""
        notes.begin(batch)
        usable = self._without_deadly(batch, notes, set_aside)
        if usable is None:
            return None, []
        try:
            found = self._rows(usable)
        except (TensortapError, MemoryError, OSError):
            raise
        except Exception as error:
            usable = self._without_failing(usable, error, set_aside)
            found = [] if usable is None else self._rows(usable)
        self._failing = 0 if usable is not None else self._failing
        return usable, found

    def _rows(self, batch: InputBatch) -> SiteRows:
        found: SiteRows = []
        self._forward(batch, lambda site, rows: found.append((site, rows)))
        return found

    def _without_deadly(self, batch: InputBatch, notes: CrashNotes, set_aside: SetAside) -> InputBatch | None:
        """Return the samples of a batch that do not kill the worker: all of them, unless it died in this batch."""
        bad = notes.deadly(batch, lambda one: self._forward(one, lambda site, rows: None))
        if not bad:
            return batch
        set_aside += [{"sample": int(s), "why": f"the worker died {TRIES} times in it"} for s in bad]
        rest = np.flatnonzero(~np.isin(batch.samples, bad))
        return batch.only(rest) if len(rest) else None

    def _without_failing(self, batch: InputBatch, error: Exception, set_aside: SetAside) -> InputBatch | None:
        """Return the batch without the samples that the model raises on; if it seems to raise on all, raise."""
        failing = {i: why for i in range(len(batch.samples)) if (why := self._failure(batch.only(np.array([i]))))}
        everything = len(failing) == len(batch.samples)
        self._failing += everything
        if not failing or (everything and (len(batch.samples) > 1 or self._failing > MOST_FAILING)):
            where = f"the batch of samples {batch.samples[0]} to {batch.samples[-1]}"
            who = "keep=" if isinstance(error, KeepError) else "the model"
            raise HarvestError(f"{who} raised on {where}: {_described(error)}{_hint(batch, error)}") from error
        set_aside += [{"sample": int(batch.samples[i]), "why": why} for i, why in failing.items()]
        rest = [i for i in range(len(batch.samples)) if i not in failing]
        return batch.only(np.array(rest)) if rest else None

    def _failure(self, one: InputBatch) -> str:
        why = ""
        for _ in range(TRIES):
            try:
                self._forward(one, lambda site, rows: None)
                return ""
            except Exception as error:
                why = _described(error)[:200]
        return why


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, KeepError) else f"{type(error).__name__}: {error}"


def _hint(batch: InputBatch, error: Exception) -> str:
    if isinstance(error, TypeError) and "positional argument" in str(error) and isinstance(batch.inputs, tuple):
        entries = len(batch.inputs)
        return f". A batch of {entries} entries is given as {entries} arguments: for the first alone, write inputs=[0]"
    return ""
