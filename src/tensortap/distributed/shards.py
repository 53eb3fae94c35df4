"""Which part of a tensor a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Shard(NamedTuple):
    """The part of a tensor that this rank holds: how the whole lies over a mesh of ranks, and where this one is on it.

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
        """Whether another rank holds the same and is the one that counts."""
        return any(at and how == "R" for at, how in zip(self.at, self.placements, strict=True))

    @property
    def is_partial_sum(self) -> bool:
        """Whether ranks hold partial sums: no statistic of the whole can be had from theirs."""
        return any(how.startswith("P") for how in self.placements)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data, with its derived properties."""
        return {
            "mesh": dict(self.mesh), "at": list(self.at), "placements": list(self.placements),
            "shape": list(self.shape), "ranks": list(self.ranks), "replica": self.replica,
            "summand": self.is_partial_sum,  # the name that runs have had since version 1
        }  # fmt: skip
