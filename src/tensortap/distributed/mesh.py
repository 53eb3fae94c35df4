"""The positions of a run's ranks on its mesh, and the sides along which they have data of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensortap.errors import RunError

Parts = Mapping[int, Mapping[str, Mapping[str, Any]]]
_DATA: Final = frozenset(
    ("ddp", "dp", "fsdp", "hsdp", "data", "batch", "replicate", "shard", "dp_replicate", "dp_shard", "data_parallel")
)


class Mesh(NamedTuple):
    """The sides of a mesh, each rank's coordinates, and the sides along which each rank has its part of the batch."""

    sides: Mapping[str, int]
    at: Mapping[int, tuple[int, ...]]
    data: frozenset[str]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank lies on each side."""
        return dict(zip(self.sides, self.at[rank], strict=True))


def mesh_of(ranks: Sequence[int], parts: Parts, given: Mapping[str, int] | None) -> Mesh:
    """Return the mesh as the user gives it, else as ranks recorded it, else one side with all ranks.

    >>> mesh_of([0, 1, 2, 3], {}, {"dp": 2, "tp": 2}).coordinates(3)
    {'dp': 1, 'tp': 1}
    """
    if given is not None:
        return _given(ranks, given)
    known = {rank: widest for rank in ranks if (widest := _widest(parts.get(rank, {}).values())) is not None}
    sides = next(iter(known.values()))["mesh"] if known else {}
    if len(known) < len(ranks) or any(shard["mesh"] != sides for shard in known.values()):
        return Mesh({"rank": len(ranks)}, {rank: (i,) for i, rank in enumerate(ranks)}, frozenset({"rank"}))
    at = {rank: tuple(shard["at"]) for rank, shard in known.items()}
    if len(set(at.values())) < len(at) and (both := _product(ranks, parts)) is not None:
        sides, at = both
    data = frozenset(side for side in sides if side in _DATA or _shards_everything(side, parts))
    if len(set(at.values())) == len(at):
        return Mesh(dict(sides), at, data)
    seen: dict[tuple[int, ...], int] = {}
    for rank in sorted(at):  # ranks of several meshes, such as one for each pipeline stage or tensor-parallel rank
        seen[at[rank]] = number = seen.get(at[rank], -1) + 1
        at[rank] = (number, *at[rank])
    return Mesh({"group": max(seen.values()) + 1, **sides}, at, data | {"group"})


def _product(ranks: Sequence[int], parts: Parts) -> tuple[dict[str, int], dict[int, tuple[int, ...]]] | None:
    """Return the mesh that several small ones make together, such as DistributedDataParallel's and tensor parallel's.

    None where they do not tell every rank from all others.
    """
    sizes: dict[str, int] = {}
    places: dict[int, dict[str, int]] = {rank: {} for rank in ranks}
    for rank in ranks:
        for shard in parts.get(rank, {}).values():
            for (side, size), at in zip(shard["mesh"].items(), shard["at"], strict=True):
                if sizes.setdefault(side, size) != size or places[rank].setdefault(side, at) != at:
                    return None
    if any(place.keys() != sizes.keys() for place in places.values()) or math.prod(sizes.values()) != len(ranks):
        return None
    found = {rank: tuple(place[side] for side in sizes) for rank, place in places.items()}
    return (sizes, found) if len(set(found.values())) == len(ranks) else None


def _given(ranks: Sequence[int], given: Mapping[str, int]) -> Mesh:
    size = math.prod(given.values())
    if not given or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in given.values()):
        raise RunError(f"mesh= must give each side a size, such as mesh={{'dp': 2, 'tp': 4}}, got {given!r}")
    if ranks and size <= max(ranks):
        raise RunError(
            f"mesh= must have a place for every rank, got {dict(given)} for {size} of {max(ranks) + 1} ranks: "
            f"the sizes must multiply to {max(ranks) + 1}, the side whose neighbours have adjacent ranks last"
        )
    at = {rank: tuple(_unravel(rank, list(given.values()))) for rank in ranks}
    named = frozenset(side for side in given if side in _DATA)
    return Mesh(dict(given), at, named)


def _unravel(rank: int, sizes: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(sizes):
        found.append(rank % size)
        rank //= size
    return found[::-1]


def _widest(shards: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    found = [shard for shard in shards if math.prod(shard["mesh"].values()) > 1]
    return max(found, key=lambda shard: (math.prod(shard["mesh"].values()), len(shard["mesh"])), default=None)


def _shards_everything(side: str, parts: Parts) -> bool:
    """Return whether every parameter is cut along this side, as FSDP does: ranks have batches of their own."""
    shards = [shard for of in parts.values() for name, shard in of.items() if name.endswith(":param")]
    placed = [dict(zip(shard["mesh"], shard["placements"], strict=True)).get(side, "R") for shard in shards]
    return bool(placed) and all("S(0" in how for how in placed)


def require_all_ranks(path: str, ranks: Sequence[int], parts: Parts, info: Mapping[str, Any]) -> None:
    """Raise unless every rank of the launch recorded: without one, no whole tensor can be put together."""
    world = info.get("world")
    said = {rank for of in parts.values() for shard in of.values() for rank in shard.get("ranks") or ()}
    expected = said | set(range(world if isinstance(world, int) else max(ranks, default=0) + 1))
    missing = sorted(expected - set(ranks))
    if missing:
        one = len(missing) == 1
        raise RunError(
            f"{path} has nothing of rank{'' if one else 's'} {', '.join(map(str, missing))} of {len(expected)}: whole "
            f"tensors cannot be put together without {'its part' if one else 'their parts'}. Copy the folder"
            f"{'' if one else 's'} {', '.join(f'rank={rank}' for rank in missing[:3])} into the run, and record "
            "without ranks="
        )
