"""Many processes: which one this is, which of them record, and which part of a tensor each of them holds."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from tensortap.errors import ProbeError

Ranks = int | Iterable[int] | Callable[[int, int], bool] | None
_RANK: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class World(NamedTuple):
    """The number of this process, and how many there are."""

    rank: int
    size: int


def of_environment() -> World:
    """What torchrun, Slurm or MPI say; a process that nobody launched is alone."""
    rank = _first(_RANK, 0)
    return World(rank, max(_first(_SIZE, 1), rank + 1))


def records(ranks: Ranks, world: World) -> bool:
    """Whether this process is among those that `ranks=` chooses.

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
            f"ranks={function!r} cannot be called as (rank, world) -> bool: {error}; write "
            "ranks=lambda rank, world: rank == 0"
        ) from None
    except ValueError:
        pass  # some built-ins do not tell their signature
    return function


def _numbers(ranks: Any, world: World) -> set[int]:
    if isinstance(ranks, (bool, str, bytes)):
        raise ProbeError(f"ranks={ranks!r} {_INSTEAD}")
    try:
        found = {_number(rank) for rank in (ranks if isinstance(ranks, Iterable) else [ranks])}
    except TypeError:
        raise ProbeError(f"ranks={ranks!r} {_INSTEAD}") from None
    if not found:
        raise ProbeError("ranks=[] chooses nobody; write ranks=0, or nothing for all of them")
    if wrong := sorted(rank for rank in found if not 0 <= rank < world.size):
        there = f"there are {world.size}, 0 to {world.size - 1}" if world.size > 1 else "this process, rank 0, is alone"
        raise ProbeError(f"ranks={ranks!r} names rank {wrong[0]}, and {there}")
    return found


_INSTEAD: Final = (
    "chooses no ranks: write a number (ranks=0), several (ranks=[0, 2]) or a function "
    "(ranks=lambda rank, world: rank % 8 == 0)"
)


def _number(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


class Shard(NamedTuple):
    """Which part of a tensor this rank holds: how the whole lies over a mesh of ranks, and where this one is on it.

    Placements are written as DTensor does: `S(0)` is a piece along dimension 0, `R` a copy, `P(sum)` a partial sum.

    >>> copy = Shard({"dp": 2, "tp": 2}, (0, 1), ("S(0)", "R"), (8, 4))
    >>> copy.replica, copy.is_partial_sum
    (True, False)
    """

    mesh: Mapping[str, int]
    at: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]  # of the whole
    ranks: tuple[int, ...] = ()  # those on the mesh: other ranks, on another mesh like it, hold another tensor

    @property
    def replica(self) -> bool:
        """Whether another rank counts for what this one holds too."""
        return any(at and how == "R" for at, how in zip(self.at, self.placements, strict=True))

    @property
    def is_partial_sum(self) -> bool:
        """Whether ranks hold partial sums: no statistic of the whole can be had from theirs."""
        return any(how.startswith("P") for how in self.placements)

    def as_json(self) -> dict[str, Any]:
        """Plain values, with what follows from them."""
        return {
            "mesh": dict(self.mesh), "at": list(self.at), "placements": list(self.placements),
            "shape": list(self.shape), "ranks": list(self.ranks), "replica": self.replica,
            "summand": self.is_partial_sum,  # the name that runs have had since version 1
        }  # fmt: skip
