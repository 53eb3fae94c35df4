"""Who does the parts: this process, the processes of torchrun, or the workers of Ray (`ray_engine.py`)."""

from __future__ import annotations

from typing import Protocol

from tensortap.distributed.ranks import World, of_environment
from tensortap.errors import HarvestError
from tensortap.harvest.folder import HarvestFolder
from tensortap.harvest.job import Job, TappedModel
from tensortap.harvest.plan import HarvestPlan
from tensortap.harvest.progress import HarvestProgress
from tensortap.harvest.sources import Source
from tensortap.harvest.worker import PartWorker


class Engine(Protocol):
    """Runs the parts that are not committed yet."""

    @property
    def name(self) -> str:
        """What it is called."""

    def prepare(self, job: Job, source: Source) -> None:
        """Start what the engine needs, or raise: it is called before a harvest that was there is removed."""

    def run(
        self, job: Job, model: TappedModel, source: Source, plan: HarvestPlan, folder: HarvestFolder,
        progress: HarvestProgress,
    ) -> int | None:  # fmt: skip
        """Do what is left, and return how many parts there are; None where others are still at work."""


class Processes:
    """This process, or every process that torchrun, Slurm or MPI launched: each does every n-th part.

    They send each other nothing. The one that commits the last part finishes the harvest.
    """

    def __init__(self, world: World) -> None:
        self.name = "local" if world.size == 1 else "torchrun"
        self.world = world

    def prepare(self, job: Job, source: Source) -> None:
        """Do nothing: the model and the data are in this process."""

    def run(
        self, job: Job, model: TappedModel, source: Source, plan: HarvestPlan, folder: HarvestFolder,
        progress: HarvestProgress,
    ) -> int | None:  # fmt: skip
        """Do this process's parts."""
        done = folder.committed()
        with PartWorker(folder, plan, source, model.forward(job), progress.advance, job.run_before) as worker:
            part = self.world.rank
            while source.batches is None or part * plan.batches_per_part < source.batches:
                if part in done:
                    progress.skipped(plan.batches_per_part)
                elif not worker.begin(part):
                    break
                part += self.world.size
        parts = number_of_parts(source, plan, part)
        return parts if len(folder.committed()) >= parts else None


def number_of_parts(source: Source, plan: HarvestPlan, otherwise: int) -> int:
    """Return how many parts there are, once the data was read to its end."""
    return otherwise if source.batches is None else -(-source.batches // plan.batches_per_part)


def engine_for(wanted: str | Engine | None) -> Engine:
    """Return the engine that a user names."""
    if wanted is None or wanted == "torchrun":
        return Processes(of_environment())
    if wanted == "local":
        return Processes(World(0, 1))
    if isinstance(wanted, (str, type)) or not (hasattr(wanted, "prepare") and hasattr(wanted, "run")):
        raise HarvestError(f'engine must be "local", "torchrun" or tt.Ray(workers=2), got {wanted!r}')
    return wanted
