"""Run a batch of the harvest while another process runs the first one to make the plan.

With several processes, the first makes the plan. The others would only make the same plan again: instead each runs a
batch that will most likely be its own, and takes the plan that it then finds. If there is none yet, it makes the plan
itself, so that no process depends on another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tensortap.distributed.ranks import World
from tensortap.errors import HarvestError
from tensortap.harvest.crash_notes import CrashNotes
from tensortap.harvest.folder import HarvestFolder
from tensortap.harvest.job import BatchForward
from tensortap.harvest.plan import HarvestPlan, longest_part
from tensortap.harvest.rows import KeptRows
from tensortap.harvest.sources import Source

_LOOKS: Final = 32  # how often the plan is looked for in the time that running the first batch would take


@dataclass(frozen=True)
class BatchAhead:
    """A batch that was run before there was a plan: its rows, and the sites without a dimension for samples."""

    number: int
    rows: Mapping[str, KeptRows]
    left_out: frozenset[str]
    seconds: float

    def fits(self, plan: HarvestPlan) -> bool:
        """Return whether the batch reached the sites of the plan, and no others: else it is run again."""
        return self.rows.keys() == {site.site for site in plan.sites} and self.left_out == set(plan.left_out)


def batch_to_run_ahead(world: World, expected: int | None) -> int | None:
    """Return the number of a batch that this process will run if parts are long and, if possible, if they are short.

    The plan decides how long they are. Most data sets are cut into 16 parts, those with large rows or small shards
    into single batches.

    >>> batch_to_run_ahead(World(1, 2), 24), batch_to_run_ahead(World(1, 2), 96), batch_to_run_ahead(World(0, 2), 24)
    (3, 7, None)
    """
    if world.rank == 0:
        return None
    if expected is None:
        return world.rank
    longest = longest_part(expected)
    mine = range(world.rank * longest, min((world.rank + 1) * longest, expected))  # its first part, if it is long
    return next((n for n in mine if n % world.size == world.rank), mine[0] if mine else None)


def run_ahead(source: Source, world: World, forward: BatchForward, notes: CrashNotes) -> BatchAhead | None:
    """Run a batch; None for the process that makes the plan, and where the batch cannot be run just like that."""
    number = batch_to_run_ahead(world, source.expected)
    if number is None or notes.again:  # a process died in it: that is dealt with when its part is done
        return None
    batch = source.peek_at(number)
    if batch is None:
        return None
    notes.start()
    begun, rows = time.monotonic(), dict[str, KeptRows]()
    try:
        forward(batch, rows.__setitem__)
    except Exception:  # it comes again when the part is done, which knows what to do about it
        return None
    finally:
        notes.forget()
    return BatchAhead(number, rows, frozenset(forward.left_out), time.monotonic() - begun)


def plan_of_another(
    folder: HarvestFolder, seconds: float, sleep: Callable[[float], None] = time.sleep
) -> dict[str, Any] | None:
    """Return the plan that another process writes; None where it takes longer than to run a batch once more."""
    for look in range(_LOOKS + 1):
        try:
            if (found := folder.read()) is not None:
                return found
        except (HarvestError, OSError):  # it is being written
            pass
        if look < _LOOKS:
            sleep(seconds / _LOOKS)
    return None
