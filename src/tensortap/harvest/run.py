"""`harvest`: the activations of a whole data set, in a folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tensortap import text
from tensortap.distributed.ranks import World, of_environment
from tensortap.errors import HarvestError
from tensortap.harvest.ahead import BatchAhead, plan_of_another, run_ahead
from tensortap.harvest.batch import TOKEN_IDS, Key
from tensortap.harvest.crash_notes import CrashNotes
from tensortap.harvest.dtypes import dtype_name
from tensortap.harvest.engines import Engine, Processes, engine_for
from tensortap.harvest.failing_samples import FaultTolerantForward, SetAside
from tensortap.harvest.fingerprints import fingerprint_of_function, fingerprint_of_options
from tensortap.harvest.folder import HarvestFolder
from tensortap.harvest.job import Job, TappedModel, checked_inputs, without_samples
from tensortap.harvest.keep import Keep, KeepFunction, as_keep
from tensortap.harvest.plan import (
    HarvestPlan,
    SitePlan,
    checked_seed,
    cut_into_parts,
    folder_name,
    number_of_bytes,
    rows_in_block,
)
from tensortap.harvest.progress import HarvestProgress
from tensortap.harvest.reader import Harvest, open_harvest
from tensortap.harvest.rows import KeptRows
from tensortap.harvest.sources import MOST_KEPT, Collate, checked_batch_size, checked_collate


def harvest(
    model: Any,
    data: Any,
    *sites: Any,
    to: str | os.PathLike[str],
    keep: Keep | KeepFunction | None = None,
    dtype: Any = None,
    batch_size: int | None = None,
    collate: Collate | None = None,
    inputs: Key | Sequence[Key] | None = None,
    token_ids: Key = TOKEN_IDS,
    stop: Literal["auto"] | None = "auto",
    engine: str | Engine | None = None,
    seed: int = 0,
    shard_size: int | str = "32MB",
    spread: int = 8,
    overwrite: bool = False,
    progress: bool = True,
) -> Harvest:
    """Run a model over a data set and write what comes out of some sites to a folder, every row exactly once.

    >>> import torch, tempfile
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    >>> data = [torch.ones(2, 4), torch.zeros(2, 4)]
    >>> acts = harvest(model, data, "1:output", to=tempfile.mkdtemp() + "/acts", progress=False)
    >>> acts.rows, acts.sites
    (4, ['1:output'])

    `model` is a model of any framework, or a function that returns one. `data` is an iterable of batches, a DataLoader,
    a dataset or a list of samples (put together `batch_size` at a time, by `collate` where it is given), a Ray Dataset,
    paths of Parquet files, or a function that returns one of these. From a batch that is a dict the model is given
    what its forward takes, or what `inputs` names; of a tuple all, or the places that `inputs` names.
    `token_ids` says where the ids of tokens are, in the same way.

    `keep` says what becomes a row: `tokens()` (the default), `samples()`, `pooled()`, `top_k()` or a function. The same
    call again goes on where it stopped; another model, data set or option is refused, `overwrite=True` begins again.
    """
    if not sites:
        raise HarvestError('harvest(model, data, ...) needs at least one site, e.g. "blocks.6:output"')
    if stop not in ("auto", None):
        raise HarvestError(f'stop must be "auto" or None, got {stop!r}')
    kept = as_keep(keep)
    element = None if dtype is None else dtype_name(dtype)
    job = Job(
        model, data, sites, keep=kept, dtype=element, batch_size=checked_batch_size(batch_size),
        collate=checked_collate(collate), inputs=checked_inputs(inputs), token_ids=token_ids, stop=stop == "auto",
        seed=checked_seed(seed),
    )  # fmt: skip
    size = number_of_bytes(shard_size)
    if not isinstance(spread, int) or not 1 <= spread <= 64:
        raise HarvestError(f"spread must be between 1 and 64 shards, got {spread!r}")
    options = {
        "sites": [str(getattr(site, "text", None) or getattr(site, "__qualname__", site)) for site in sites],
        "keep": kept.describe(), "dtype": element, "batch_size": job.batch_size, "inputs": job.inputs, "seed": job.seed,
        "token_ids": token_ids, "shard_size": size, "spread": spread,
    }  # fmt: skip
    if collate is not None:
        options["collate"] = fingerprint_of_function(collate)
    return _Harvesting(job, HarvestFolder(to), engine_for(engine), options).run(overwrite, progress)


class _Harvesting:
    """One call of `harvest`: find or make the plan, let the engine work, finish."""

    def __init__(self, job: Job, folder: HarvestFolder, engine: Engine, options: dict[str, Any]) -> None:
        self._job = job
        self._folder = folder
        self._engine = engine
        self._options = options
        self._model = TappedModel(job)
        self._source = job.source()
        self._world = engine.world if isinstance(engine, Processes) else World(0, 1)
        self._left_out: dict[str, tuple[int, ...]] = {}

    def run(self, overwrite: bool, shown: bool) -> Harvest:
        """Harvest, or go on with it, and take the taps off whatever happens."""
        with self._model.framework.seeded(self._options["seed"]):  # a loader draws a seed for each pass
            try:
                self._run(overwrite, shown)
            finally:
                self._model.close()
        return open_harvest(self._folder.files.url)

    def _run(self, overwrite: bool, shown: bool) -> None:
        if overwrite and of_environment().size > 1:
            raise HarvestError("overwrite=True is not possible with several processes: remove the folder before them")
        before = None if overwrite else self._folder.read()
        fingerprints = self._fingerprints()
        if before is not None:
            plan = HarvestPlan.of_json(before)
            plan.check_same(fingerprints, str(self._folder))
        else:
            self._engine.prepare(self._job, self._source)
            plan = self._new_plan(fingerprints, overwrite)
        self._job = dataclasses.replace(self._job, left_out=plan.left_out)
        with HarvestProgress(str(self._folder), self._source.expected, shown) as progress:
            if self._job.left_out:
                progress.say(f"without a dimension for samples, and left out: {', '.join(self._job.left_out)}")
            complete = bool((self._folder.read() or {}).get("complete"))
            self._work(plan, progress, resumed=before is not None, complete=complete)

    def _work(self, plan: HarvestPlan, progress: HarvestProgress, resumed: bool, complete: bool) -> None:
        if complete:
            self._folder.tidy()
            progress.say("is complete already; nothing was done")
            return
        if resumed and self._world.rank == 0:  # to another process, what its neighbours have done looks the same
            done = len(self._folder.committed())
            progress.say(f"{text.counted(done, 'part')} committed before; going on from there")
        parts = self._engine.run(self._job, self._model, self._source, plan, self._folder, progress)
        if parts is not None:
            self._folder.finish(plan, parts)
        progress.say(progress.summary())
        if aside := (self._folder.read() or {}).get("set_aside"):
            listed = ", ".join(str(each["sample"]) for each in aside[:5])
            progress.say(f"{text.counted(len(aside), 'sample')} set aside ({listed}): {aside[0]['why']}")

    def _fingerprints(self) -> dict[str, str]:
        return {
            "model": self._model.fingerprint(),
            "data": self._source.fingerprint(),
            "options": fingerprint_of_options(self._options),
        }

    def _new_plan(self, fingerprints: dict[str, str], overwrite: bool) -> HarvestPlan:
        """Make the plan, or take that of the process that makes it for all."""
        ahead = self._run_ahead()
        if ahead is not None and (found := plan_of_another(self._folder, ahead.seconds)) is not None:
            plan = HarvestPlan.of_json(found)
            plan.check_same(fingerprints, str(self._folder))
            if ahead.fits(plan):
                self._keep_for_later(ahead.number, ahead.rows)
                return plan
        self._model.close()  # taps learn from the first batch which site is the last: let it be the plan's
        plan = self._plan(fingerprints)
        if ahead is not None and ahead.fits(plan):
            self._keep_for_later(ahead.number, ahead.rows)
        if overwrite:  # only now: the engine is ready, and the first batch has shown that all else is good
            self._folder.clear()
        self._folder.write_plan(plan)
        return plan

    def _run_ahead(self) -> BatchAhead | None:
        if self._world.rank == 0:
            return None
        notes = CrashNotes(self._folder.staging, f"ahead-{self._world.rank}")
        return run_ahead(self._source, self._world, self._model.forward(self._job), notes)

    def _keep_for_later(self, number: int, rows: Mapping[str, KeptRows]) -> None:
        """Keep the rows of a batch that was run before the work began, which then need not run it."""
        self._job = dataclasses.replace(self._job, run_before={**self._job.run_before, number: dict(rows)})

    def _plan(self, fingerprints: dict[str, str]) -> HarvestPlan:
        """Run the first batch to learn which sites there are, how wide they are and how many rows a batch gives."""
        found, samples = self._first_rows()
        plans: list[SitePlan] = []
        for site, rows in found.items():
            folder = folder_name(site, [plan.folder for plan in plans])
            width = 0 if rows.indices is None else rows.indices.shape[1]
            plans.append(SitePlan(site, folder, rows.values.shape[1], str(rows.values.dtype), width))
        batch = max(rows.values.nbytes for rows in found.values())
        widest = max(rows.values.itemsize * rows.values.shape[1] for rows in found.values())
        shard_size, spread = self._options["shard_size"], self._options["spread"]
        batches, shards = cut_into_parts(batch, self._source.expected, shard_size, spread)
        about = {
            "model": type(self._model.model).__qualname__, "framework": self._model.framework.capabilities.title,
            "data": self._source.kind, "samples_per_batch": samples, "left_out": list(self._left_out), **self._options,
        }  # fmt: skip
        block = rows_in_block(widest, shards * len(plans))
        return HarvestPlan(tuple(plans), batches, shards, block, self._options["seed"], fingerprints, about)

    def _first_rows(self) -> tuple[dict[str, KeptRows], int]:
        """Run the first batch of which anything can be run; what cannot be is set aside when its part is done."""
        notes = CrashNotes(self._folder.staging, "plan")
        notes.start()
        try:
            found = self._first_that_runs(notes)
        except BaseException:
            if not notes.again:  # nobody died: there is nothing to tell the next try
                notes.forget()
            raise
        notes.forget()
        return found

    def _first_that_runs(self, notes: CrashNotes) -> tuple[dict[str, KeptRows], int]:
        forward = self._model.forward(self._job)
        run = FaultTolerantForward(forward)
        for batch in self._source.peek(MOST_KEPT):
            set_aside: SetAside = []
            usable, rows = run(batch, notes, set_aside)
            if usable is None:
                continue
            self._left_out = forward.left_out
            if not rows:
                raise self._nothing(len(usable.samples))
            if batch.number == 0 and not set_aside:
                self._keep_for_later(0, dict(rows))
            return dict(rows), len(usable.samples)
        raise HarvestError("the data yields nothing: a harvest needs at least one batch")

    def _nothing(self, samples: int) -> HarvestError:
        for site, shape in self._left_out.items():
            return without_samples(site, shape, samples)
        wanted = ", ".join(self._options["sites"])
        return HarvestError(f"the model reaches none of {wanted}: tt.sites(model, batch) lists what it reaches")
