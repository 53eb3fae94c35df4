"""Do the parts of a harvest: run their batches, and have their rows written and committed on a thread of its own.

Whatever kills a worker, its next try begins the part again. A part that killed its worker is done with a note before
each batch; a batch that was running when the worker died is first tried sample by sample, and a sample that was running
three times is set aside (`crash_notes.py`, `failing_samples.py`): named, counted, and left out. All else is written as
if nothing had happened, to the last byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Self

from tensortap.errors import HarvestError
from tensortap.harvest.background import BackgroundWriter
from tensortap.harvest.batch import InputBatch
from tensortap.harvest.crash_notes import CrashNotes
from tensortap.harvest.failing_samples import FaultTolerantForward, SetAside, SiteRows
from tensortap.harvest.folder import Entry, HarvestFolder
from tensortap.harvest.job import BatchForward
from tensortap.harvest.plan import HarvestPlan
from tensortap.harvest.rows import KeptRows
from tensortap.harvest.sources import Source
from tensortap.harvest.unfinished import UnfinishedPart

Advance = Callable[[int, int, int], None]  # samples, rows and bytes since the last call


class PartWorker:
    """Do parts of one harvest, one after another; a background thread writes them in the same order."""

    def __init__(
        self, folder: HarvestFolder, plan: HarvestPlan, source: Source, forward: BatchForward, advance: Advance,
        run_before: Mapping[int, Mapping[str, KeptRows]] | None = None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._plan = plan
        self._source = source
        self._forward = FaultTolerantForward(forward)
        self._advance = advance
        self._run_before = run_before or {}
        self._sites = {site.site: site for site in plan.sites}
        self._writer = BackgroundWriter()
        self._unfinished: dict[int, UnfinishedPart] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._writer.wait()
            elif isinstance(error, Exception):  # parts that are whole are committed all the same
                with contextlib.suppress(Exception):
                    self._writer.wait()
        finally:
            self._writer.close()
            for part in self._unfinished.values():
                part.close()

    def do(self, part: int) -> Entry | None:
        """Do a part, and return its entry in the manifest once it is committed; None when the data ends before it."""
        done: list[Entry] = []
        self.begin(part, done.append)
        self._writer.wait()
        return done[0] if done else None

    def begin(self, part: int, committed: Callable[[Entry], None] = lambda entry: None) -> bool:
        """Run a part's batches; it is committed later. Return False when the data ends before it."""
        notes = CrashNotes(self._folder.staging, f"{part:06d}")
        if notes.again:
            self._writer.wait()  # this part may kill the process: what came before it is brought home first
        notes.start()
        unfinished = self._unfinished[part] = UnfinishedPart(self._folder, self._plan, part)
        samples, set_aside = self._run_batches(unfinished, notes)
        if not samples and not set_aside:
            return False
        notes.survived()

        def finished(entry: Entry) -> None:
            notes.forget()
            del self._unfinished[part]
            committed(entry)

        self._writer.put(partial(unfinished.commit, samples, set_aside, finished))
        return True

    def _run_batches(self, unfinished: UnfinishedPart, notes: CrashNotes) -> tuple[int, SetAside]:
        count, samples = self._plan.batches_per_part, 0
        set_aside: SetAside = []
        for batch in self._source.read(unfinished.part * count, count):
            usable, found = self._rows(batch, notes, set_aside)
            if usable is None:
                continue
            self._check(usable, found)
            size = sum(rows.values.nbytes for _, rows in found)
            self._writer.put(partial(unfinished.add, found), size)
            samples += len(usable.samples)
            self._advance(len(usable.samples), sum(len(rows) for _, rows in found), size)
        return samples, set_aside

    def _rows(self, batch: InputBatch, notes: CrashNotes, set_aside: SetAside) -> tuple[InputBatch | None, SiteRows]:
        if (rows := self._run_before.get(batch.number)) is not None:
            return batch, list(rows.items())
        return self._forward(batch, notes, set_aside)

    def _check(self, batch: InputBatch, found: SiteRows) -> None:
        """Raise if a batch gave other sites, or vectors of another length or type, than the first one."""
        where = f"samples {batch.samples[0]} to {batch.samples[-1]}"
        if more := {site for site, _ in found} - self._sites.keys():
            raise HarvestError(
                f"{where} reach {', '.join(sorted(more))}, which the first batch did not: name the sites exactly, or "
                "begin with a batch that reaches them all"
            )
        for site, rows in found:
            plan, width = self._sites[site], rows.values.shape[1]
            if width != plan.width:
                raise HarvestError(
                    f"{site} must give vectors of one length, got {width} elements for {where} after {plan.width}: "
                    "write keep=tt.tokens() or tt.pooled() where only the number of positions varies"
                )
            if str(rows.values.dtype) != plan.dtype:
                raise HarvestError(
                    f"{site} must give elements of one type, got {rows.values.dtype} for {where} after {plan.dtype}: "
                    f'choose one for all, dtype="{plan.dtype}"'
                )
