"""Tell which ranks should hold the same tensor, and which of them do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensortap.types import Place

ALONE: Final = "alone"  # the group of a piece that no other rank holds
MISSING: Final = "missing"  # the content of a tensor that a rank did not record and its replicas did
_SAME_START: Final = 0.5  # of the parameters that vary, for ranks of which nothing is known to count as replicas
Group = tuple[int, ...]


class ReplicaMark(NamedTuple):
    """One rank's record of a tensor: `content` is equal for equal tensors, on ranks of one `group`.

    The group is None where nothing was recorded of the placement. A constant tensor, as norms begin, is equal on ranks
    that share nothing.
    """

    content: Any
    group: Any = None
    constant: bool = False


Marks = Mapping[int, ReplicaMark]  # by rank


def group_of(shard: Mapping[str, Any]) -> Any:
    """Return a key that is equal for ranks that hold the same piece, from a rank's description of its shard.

    >>> group_of({"mesh": {"dp": 2}, "at": [1], "placements": ["R"], "ranks": [0, 1], "summand": False})
    ((('dp', 2),), (0, 1), ())
    """
    if "R" not in shard["placements"] or shard["summand"]:
        return ALONE
    kept = [at for at, how in zip(shard["at"], shard["placements"], strict=True) if how != "R"]
    return (tuple(shard["mesh"].items()), tuple(shard["ranks"]), tuple(kept))


class UnequalReplicas(NamedTuple):
    """A tensor that should be equal on replicas and is not, with the record of each replica."""

    place: Place
    marks: Marks

    def odd(self) -> tuple[Group, Group]:
        """Return the ranks that differ from the majority, and the majority; of two, the second is the odd one."""
        groups: dict[Any, list[int]] = {}
        for rank, mark in sorted(self.marks.items()):
            groups.setdefault(mark.content, []).append(rank)
        majority = max(groups.values(), key=len)
        return tuple(rank for rank in sorted(self.marks) if rank not in majority), tuple(majority)

    def __str__(self) -> str:
        odd, majority = self.odd()
        return f"{self.place} on rank {listed(odd)} differs from rank {listed(majority)}"


class ReplicaCheck:
    """Compare what ranks recorded, step after step.

    Ranks that recorded a placement say themselves what they share. Other ranks are taken for replicas if they began
    with the same parameters, except for a few. Buffers that were never equal are each rank's own.

    >>> check, weight = ReplicaCheck(), Place("fc.weight", "param")
    >>> list(check.unequal({weight: {0: ReplicaMark(1), 1: ReplicaMark(1)}}))
    []
    >>> str(next(check.unequal({weight: {0: ReplicaMark(2), 1: ReplicaMark(3)}})))
    'fc.weight:param on rank 1 differs from rank 0'
    """

    def __init__(self) -> None:
        self._alike: list[Group] | None = None
        self._began_equal: dict[tuple[Place, Any], bool] = {}
        self._optimizing: set[int] = set()  # ranks that have recorded an update

    def unequal(self, step: Mapping[Place, Marks]) -> Iterator[UnequalReplicas]:
        """Yield the tensors of a step that replicas should share and do not."""
        if self._alike is None and any(place.port == "param" for place in step):
            self._alike = _alike([marks for place, marks in step.items() if place.port == "param"])
        idle = self._idle(step)
        for place, marks in step.items():
            if place.port == "update" and idle:
                marks = {**marks, **dict(self._missing(place, step, idle))}
            for key, ranks in self._replicas(marks):
                same = len({marks[rank].content for rank in ranks}) < 2
                began_equal = self._began_equal.setdefault((place, key), same)
                if not same and (began_equal or place.port != "buffer"):
                    yield UnequalReplicas(place, {rank: marks[rank] for rank in ranks})

    def _idle(self, step: Mapping[Place, Marks]) -> set[int]:
        """Return the ranks that skip this update: they have parameters, and had updates in an earlier step."""
        updated = {rank for place, marks in step.items() if place.port == "update" for rank in marks}
        before, self._optimizing = self._optimizing, self._optimizing | updated
        return before - updated

    def _missing(self, place: Place, step: Mapping[Place, Marks], ranks: set[int]) -> Iterator[tuple[int, ReplicaMark]]:
        """Yield those of the ranks that hold the parameter of an update, with a mark that says it is not there."""
        marks = step.get(place._replace(port="param"), {})
        yield from ((rank, ReplicaMark(MISSING, marks[rank].group)) for rank in ranks if rank in marks)

    def _replicas(self, marks: Marks) -> Iterator[tuple[Any, Group]]:
        """Yield the groups of ranks that should hold the same."""
        groups: dict[Any, list[int]] = {}
        for rank, mark in marks.items():
            if mark.group is not None and mark.group != ALONE:
                groups.setdefault(mark.group, []).append(rank)
        unsaid = {rank for rank, mark in marks.items() if mark.group is None}
        for number, group in enumerate(self._alike or ()):
            groups.setdefault(number, []).extend(rank for rank in group if rank in unsaid)
        yield from ((key, tuple(sorted(ranks))) for key, ranks in groups.items() if len(ranks) > 1)


def _alike(first: Sequence[Marks]) -> list[Group]:
    """Return the ranks that began with the same parameters, but for a few."""
    groups: list[list[int]] = []
    for rank in sorted({rank for marks in first for rank in marks}):
        home = next((group for group in groups if _share(first, group[0], rank) > _SAME_START), None)
        if home is None:
            groups.append([rank])
        else:
            home.append(rank)
    return [tuple(group) for group in groups if len(group) > 1]


def alike_at_first(steps: Mapping[int, Mapping[Place, Marks]]) -> list[Group]:
    """Return the ranks that began with the same parameters, from the first step that has any."""
    params = ([m for place, m in step.items() if place.port == "param"] for _, step in sorted(steps.items()))
    return _alike(next((first for first in params if first), []))


def _share(first: Sequence[Marks], one: int, other: int) -> float:
    both = [(marks[one], marks[other]) for marks in first if one in marks and other in marks]
    varied = [pair for pair in both if not pair[0].constant]
    return sum(a.content == b.content for a, b in varied) / len(varied) if varied else 0.0


def listed(ranks: Group) -> str:
    """Return ranks as text."""
    return ", ".join(map(str, ranks))
