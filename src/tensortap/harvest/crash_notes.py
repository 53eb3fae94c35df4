"""Notes of what a worker was doing when it died, for the one that comes after it.

A worker that somebody killed looks the same from outside as one that a sample killed. So nothing is concluded from a
part that died, nor from a batch: only from a sample that was being tried alone, three times in a row. The trial throws
its results away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tensortap.errors import HarvestError
from tensortap.harvest.batch import InputBatch
from tensortap.harvest.staging import Staging

TRIES: Final = 3
MOST_DEATHS: Final = 10


class CrashNotes:
    """The notes of one part, or of another piece of work. `again` says that it was begun before, and did not end."""

    def __init__(self, staging: Staging, name: str) -> None:
        self._staging = staging
        self._name = f"tries-{name}"
        self._before = staging.note(self._name)
        self.again = bool(self._before)
        self._note: dict[str, Any] = {"bad": self._before.get("bad", [])}

    def start(self) -> None:
        """Note that the work begins."""
        self._staging.write_note(self._name, self._before or self._note)

    def survived(self) -> None:
        """Note that all batches were run: whoever dies from here on does not die of a sample."""
        if self.again:
            self._staging.write_note(self._name, self._note)

    def begin(self, batch: InputBatch) -> None:
        """Note the batch that begins, if this part has killed a worker before."""
        if self._before and batch.number not in (self._before.get("batch"), self._before.get("next")):
            self._staging.write_note(self._name, {**self._note, "next": batch.number})

    def deadly(self, batch: InputBatch, run: Callable[[InputBatch], None]) -> list[int]:
        """Return the samples of a batch that are set aside; try each alone if a worker died in this batch."""
        bad = [sample for sample in self._note["bad"] if sample in batch.samples]
        if self._before.get("next") != batch.number and self._before.get("batch") != batch.number:
            return bad
        died_in, deaths = self._before.get("sample", -1), self._before.get("deaths", 0)
        for i, sample in enumerate(batch.samples.tolist()):
            if sample in bad:
                continue
            if sample == died_in and deaths >= TRIES:
                self._note["bad"] = [*self._note["bad"], sample]
                bad.append(sample)
                continue
            again = deaths + 1 if sample == died_in else 1
            now = {"batch": batch.number, "sample": sample, "deaths": again, **self._note}
            self._staging.write_note(self._name, now)
            with contextlib.suppress(Exception):  # what raises is dealt with when the batch itself is run
                run(batch.only(np.array([i])))
        self._note_samples_survive(batch)
        return bad

    def _note_samples_survive(self, batch: InputBatch) -> None:
        """Note that no sample kills the worker by itself; refuse a batch that goes on killing it as a whole."""
        whole = self._before.get("whole", 0) + 1
        if whole > MOST_DEATHS:
            raise HarvestError(
                f"the worker died {whole - 1} times in the batch of samples {batch.samples[0]} to {batch.samples[-1]}, "
                "each of which it survives alone: write a smaller batch_size"
            )
        self._before = {**self._note, "next": batch.number, "whole": whole}
        self._staging.write_note(self._name, self._before)

    def forget(self) -> None:
        """Remove the note of a part that is committed."""
        self._staging.remove_note(self._name)
