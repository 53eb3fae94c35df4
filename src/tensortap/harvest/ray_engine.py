"""Ray does the parts: one task of Ray Data each, on workers that hold the model. Retries and transfer are Ray's."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tensortap.errors import HarvestError, TensortapError
from tensortap.harvest.engines import number_of_parts
from tensortap.harvest.folder import HarvestFolder
from tensortap.harvest.job import Job, TappedModel, is_factory
from tensortap.harvest.plan import HarvestPlan
from tensortap.harvest.progress import HarvestProgress
from tensortap.harvest.ray_start import start_ray
from tensortap.harvest.sources import IndexedSource, Source
from tensortap.harvest.worker import PartWorker

_HINTS: Final = {
    "model": "Call torch.manual_seed(0), or load weights, in the function that makes the model",
    "data": "Return the data in the same order from each call: a loader needs shuffle=False",
}


@dataclass(frozen=True)
class Ray:
    """Harvest on Ray: `tt.harvest(make_model, data, "blocks.6", to=..., engine=tt.Ray(workers=8))`.

    Give a function that returns the model where it is large: each worker calls it once. A running cluster is used, or
    a local one is started. `num_cpus` and `num_gpus` are for each worker.
    """

    workers: int = 2
    num_cpus: float = 1
    num_gpus: float = 0
    name: ClassVar[str] = "ray"

    def __post_init__(self) -> None:
        if type(self.workers) is not int or self.workers < 1:
            raise HarvestError(f"workers must be at least 1, got {self.workers!r}: write tt.Ray(workers=2)")
        for name, number in (("num_cpus", self.num_cpus), ("num_gpus", self.num_gpus)):
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
                raise HarvestError(f"{name} must be a number of at least 0, got {number!r}: write tt.Ray({name}=1)")

    def prepare(self, job: Job, source: Source) -> None:
        """Start Ray, and see that the job can be sent to its workers."""
        ray = start_ray()
        try:
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
                ray.cloudpickle.dump(sent_job(job, source), nowhere)
        except Exception as error:
            raise HarvestError(
                f"the model and the data must be such that they can be sent to workers, got {error}: give functions "
                "that return them, tt.harvest(make_model, make_data, …)"
            ) from error

    def run(
        self, job: Job, model: TappedModel, source: Source, plan: HarvestPlan, folder: HarvestFolder,
        progress: HarvestProgress,
    ) -> int:  # fmt: skip
        """Do what is left on the workers."""
        model.close()  # it may be sent to them, without our hooks
        ray = start_ray()
        parts = number_of_parts(counted(source), plan, 0)
        missing = sorted(set(range(parts)) - folder.committed())
        progress.skipped((parts - len(missing)) * plan.batches_per_part)
        if not missing:
            return parts
        sent = sent_job(job, source)
        where = str(folder.files.local.absolute()) if folder.files.local is not None else folder.files.url
        items = ray.data.from_items([{"part": part} for part in missing], override_num_blocks=len(missing))
        done = items.map_batches(
            RayWorker, batch_size=1, compute=ray.data.ActorPoolStrategy(size=min(self.workers, len(missing))),
            fn_constructor_args=(sent, plan, where), num_cpus=self.num_cpus, num_gpus=self.num_gpus or None,
        )  # fmt: skip
        try:
            for entry in done.iter_rows():
                samples, rows, size = (int(entry[name]) for name in ("samples", "rows", "bytes"))
                progress.advance(samples, rows, size, plan.batches_per_part)
        except Exception as error:
            raise _ours(error) from error
        return parts


class RayWorker:
    """An actor that does parts."""

    def __init__(self, job: Job, plan: HarvestPlan, where: str) -> None:
        folder, source = HarvestFolder(where), job.source()
        self._model = TappedModel(job)  # whose taps stay on for as long as there is this worker
        if is_factory(job.model):
            _check_same(plan, "model", self._model.fingerprint())
        _check_same(plan, "data", source.fingerprint())
        self._worker = PartWorker(folder, plan, source, self._model.forward(job), lambda *counts: None)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        """Do one part and return what it has."""
        entry = self._worker.do(int(batch["part"][0]))
        if entry is None:
            raise HarvestError(f"part {batch['part'][0]} has no data on this worker: all must see the same data")
        size = sum(shard["bytes"] for shard in entry["shards"])
        return {"part": [entry["part"]], "samples": [entry["samples"]], "rows": [entry["rows"]], "bytes": [size]}


def _check_same(plan: HarvestPlan, what: str, now: str) -> None:
    """Raise where a worker has another model or other data than the plan was made with: rows of both would be mixed."""
    if (before := plan.fingerprints[what]) != now:
        raise HarvestError(
            f"every worker must have the same {what}: its fingerprint is {before} in the driver and {now} on a worker. "
            f"{_HINTS[what]}"
        )


def sent_job(job: Job, source: Source) -> Job:
    """Return a job as it is sent to the workers: with data that can be read by index where there is such."""
    data = source.data if isinstance(source, IndexedSource) else job.data
    return dataclasses.replace(job, data=data, run_before={})


def counted(source: Source) -> Source:
    """Return a source whose number of batches is known; one that does not say is read once to count them."""
    if source.batches is None:
        for _ in source.read(0, sys.maxsize):
            pass
    return source


def _ours(error: BaseException) -> BaseException:
    """Return the error of ours that Ray wrapped, or what Ray said."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TensortapError):
            return HarvestError(str(cause))
        cause = cause.__cause__ or getattr(cause, "cause", None)
    return HarvestError(reason_in(str(error)) or f"Ray gave up: {type(error).__name__}: {error}")


def reason_in(said: str) -> str:
    """Return the error of ours in a worker's traceback, which Ray passes on as text; nothing where there is none.

    >>> reason_in("  File ...\\ntensortap.errors.HarvestError: disk is full\\n\\nThe above …\\nray.Error: 1/1")
    'disk is full'
    """
    found = re.findall(r"^tensortap\.errors\.\w+: (.+)$", said, re.MULTILINE)
    return str(found[-1]) if found else ""
