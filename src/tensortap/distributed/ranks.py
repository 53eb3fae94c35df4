"""Several processes: the rank of this one, and the ranks that record."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from tensortap.errors import ProbeError

Ranks = int | Iterable[int] | Callable[[int, int], bool] | None
_RANK: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


SPAWNED: Final = "TENSORTAP_SPAWNED"  # how many processes `torch.multiprocessing.spawn` started, in each of them


class World(NamedTuple):
    """The number of this process, and how many there are; `independent`: they exchange nothing."""

    rank: int
    size: int
    independent: bool = False


def of_environment() -> World:
    """Return the rank and the number of ranks that torchrun, Slurm or MPI set; a process without a launcher
    is alone.
    """
    rank = _first(_RANK, 0)
    return World(rank, max(_first(_SIZE, 1), rank + 1))


def records(ranks: Ranks, world: World) -> bool:
    """Return whether this process is among those that `ranks=` chooses.

    >>> records([0, 2], World(2, 4)), records(0, World(2, 4)), records(lambda rank, world: rank % 2 == 0, World(2, 4))
    (True, False, True)
    """
    if ranks is None:
        return True
    if callable(ranks):
        return bool(_checked(ranks)(world.rank, world.size))
    return world.rank in _numbers(ranks, world)


def _first(names: Iterable[str], otherwise: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), otherwise)


def _checked(function: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
    try:
        inspect.signature(function).bind(0, 1)
    except TypeError as error:
        raise ProbeError(
            f"ranks= as a function must be (rank, world) -> bool, got {function!r} ({error}): write "
            "ranks=lambda rank, world: rank == 0"
        ) from None
    except ValueError:
        pass  # some built-ins do not tell their signature
    return function


def _numbers(ranks: Any, world: World) -> set[int]:
    if isinstance(ranks, (bool, str, bytes)):
        raise ProbeError(_WRONG.format(ranks))
    try:
        found = {_number(rank) for rank in (ranks if isinstance(ranks, Iterable) else [ranks])}
    except TypeError:
        raise ProbeError(_WRONG.format(ranks)) from None
    if not found:
        raise ProbeError("ranks= must name at least one rank, got []: write ranks=0, or leave it out for all of them")
    if not all(0 <= rank < world.size for rank in found):
        there = (
            f"write numbers from 0 to {world.size - 1}" if world.size > 1 else "this process is alone, write ranks=0"
        )
        raise ProbeError(f"ranks= must name ranks that there are, got {ranks!r}: {there}")
    return found


_WRONG: Final = (
    "ranks= must be a number, several numbers or a function, got {!r}: write ranks=0, ranks=[0, 2] or "
    "ranks=lambda rank, world: rank % 8 == 0"
)


def _number(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)
