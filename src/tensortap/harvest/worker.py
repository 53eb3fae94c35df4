"""Do one part: run its batches, write its shards, put them in place, and commit.

Whatever kills a worker, its next try begins the part again. A part that killed its worker is done with a note
before each batch; a batch that was running when the worker died is first tried sample by sample, and a sample that was
running three times is set aside: named, counted, and left out. All else is written as if nothing had happened, to the
last byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensortap.errors import HarvestError, TensortapError
from tensortap.harvest.batch import InputBatch
from tensortap.harvest.folder import Entry, HarvestFolder
from tensortap.harvest.job import BatchForward
from tensortap.harvest.plan import HarvestPlan
from tensortap.harvest.rows import KeptRows
from tensortap.harvest.shards import PartWriter, checksum, shard_name
from tensortap.harvest.sources import Source
from tensortap.harvest.staging import Staging, storing

TRIES: Final = 3
MOST_DEATHS: Final = 10
Advance = Callable[[int, int, int], None]  # samples, rows and bytes since the last call


class PartWorker:
    """Does parts of one harvest, one after another."""

    def __init__(
        self, folder: HarvestFolder, plan: HarvestPlan, source: Source, forward: BatchForward, advance: Advance,
        first_rows: Mapping[str, KeptRows] | None = None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._plan = plan
        self._source = source
        self._forward = forward
        self._advance = advance
        self._first_rows = first_rows
        self._sites = {site.site for site in plan.sites}

    def do(self, part: int) -> Entry | None:
        """Do a part and return its entry in the manifest; None when the data ends before it."""
        tries = Tries(self._folder.staging, part)
        with self._folder.staging.folder(part) as staging:
            writer = PartWriter(staging, self._plan, part)
            try:
                samples, set_aside = self._fill(writer, part, tries)
                if not samples and not set_aside:
                    return None
                return self._commit(writer, part, samples, set_aside, tries)
            finally:
                writer.abandon()

    def _fill(self, writer: PartWriter, part: int, tries: Tries) -> tuple[int, list[dict[str, Any]]]:
        count, samples = self._plan.batches_per_part, 0
        set_aside: list[dict[str, Any]] = []
        for batch in self._source.read(part * count, count):
            tries.begin(batch)
            usable = self._usable(batch, tries, set_aside)
            if usable is not None:
                samples += len(usable.samples)
                self._run(usable, writer, set_aside)
        return samples, set_aside

    def _usable(self, batch: InputBatch, tries: Tries, set_aside: list[dict[str, Any]]) -> InputBatch | None:
        """Return the samples of a batch that do not kill the worker: all of them, unless it died in this batch."""
        bad = tries.deadly(batch, lambda one: self._forward(one, lambda site, rows: None))
        if not bad:
            return batch
        set_aside += [{"sample": int(s), "why": f"the worker died {TRIES} times in it"} for s in bad]
        rest = np.flatnonzero(~np.isin(batch.samples, bad))
        return batch.only(rest) if len(rest) else None

    def _run(self, batch: InputBatch, writer: PartWriter, set_aside: list[dict[str, Any]]) -> None:
        try:
            found = self._rows(batch)
        except (TensortapError, MemoryError, OSError):
            raise
        except Exception as error:
            found = self._rows(self._without_failing(batch, error, set_aside))
        with storing(self._folder):
            for site, rows in found:
                writer.add(site, rows)
        kept = sum(len(rows) for _, rows in found)
        self._advance(len(batch.samples), kept, sum(rows.values.nbytes for _, rows in found))

    def _rows(self, batch: InputBatch) -> list[tuple[str, KeptRows]]:
        if batch.number == 0 and self._first_rows is not None:
            return list(self._first_rows.items())
        found: list[tuple[str, KeptRows]] = []
        self._forward(batch, lambda site, rows: found.append((site, rows)))
        if more := {site for site, _ in found} - self._sites:
            raise HarvestError(
                f"samples {batch.samples[0]} to {batch.samples[-1]} reach {', '.join(sorted(more))}, which the first "
                "batch did not: name the sites exactly, or begin with a batch that reaches them all"
            )
        return found

    def _without_failing(self, batch: InputBatch, error: Exception, set_aside: list[dict[str, Any]]) -> InputBatch:
        """Return the batch without the samples that the model raises on; if that is all of them, raise."""
        failing = {i: why for i in range(len(batch.samples)) if (why := self._failure(batch.only(np.array([i]))))}
        first, last = int(batch.samples[0]), int(batch.samples[-1])
        if not failing or len(failing) == len(batch.samples):
            what = f"{type(error).__name__}: {error}"
            raise HarvestError(f"the model raised on the batch of samples {first} to {last}: {what}") from error
        set_aside += [{"sample": int(batch.samples[i]), "why": why} for i, why in failing.items()]
        return batch.only(np.array([i for i in range(len(batch.samples)) if i not in failing]))

    def _failure(self, one: InputBatch) -> str:
        why = ""
        for _ in range(TRIES):
            try:
                self._forward(one, lambda site, rows: None)
                return ""
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:200]
        return why

    def _commit(
        self, writer: PartWriter, part: int, samples: int, set_aside: list[dict[str, Any]], tries: Tries
    ) -> Entry:
        shards = []
        with storing(self._folder):
            closed = list(writer.close())
        for site, number, shard in closed:
            name = f"data/{site.folder}/{shard_name(part, number)}"
            shards.append(_shard_entry(name, site.site, shard.path, shard.rows))
            with storing(self._folder):
                self._folder.publish(shard.path, name)
        statistics = self._folder.write_part_statistics(self._plan, part, writer.statistics)
        rows = sum(shard["rows"] for shard in shards)
        entry = {
            "part": part, "samples": samples, "rows": rows, "shards": shards, "statistics": statistics,
            "set_aside": sorted(set_aside, key=lambda each: each["sample"]),
        }  # fmt: skip
        self._folder.commit(entry)
        tries.forget()
        return entry


class Tries:
    """Notes of what a worker was doing, for the one that comes after it."""

    def __init__(self, staging: Staging, part: int) -> None:
        self._staging = staging
        self._name = f"tries-{part:06d}"
        self._before = staging.note(self._name)
        self._note: dict[str, Any] = {"bad": self._before.get("bad", [])}
        staging.write_note(self._name, self._before or self._note)

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
        self._alone_it_lives(batch)
        return bad

    def _alone_it_lives(self, batch: InputBatch) -> None:
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


def _shard_entry(name: str, site: str, path: Path, rows: int) -> dict[str, Any]:
    return {"file": name, "site": site, "rows": rows, "bytes": path.stat().st_size, "sha256": checksum(path)}
