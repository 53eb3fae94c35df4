"""Rules on ranks: replicas that are no longer the same, and one rank whose values are apart from all others'."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import NoData, rule
from tensortap.distributed.mesh import mesh_of
from tensortap.finding import Finding, Steps
from tensortap.select.ports import MEMBER_PORTS
from tensortap.store import queries
from tensortap.types import Place

_EXACT: Final = ("mean", "std", "min", "max", "l1", "l2", "zeros", "nan", "posinf", "neginf", "numel")
_STAGES: Final = MEMBER_PORTS
_VALUES: Final = ("input", "output", "grad_output")
_SHOWN: Final = 8
Group = tuple[int, ...]  # ranks that hold the same


class _Mark(NamedTuple):
    """What is equal for equal tensors; a constant one, as norms begin, is equal on ranks that share nothing."""

    call: int
    shape: tuple[int, ...]
    content: Any
    constant: bool


class _Copies(NamedTuple):
    """What each rank recorded of one tensor at one step."""

    step: int
    place: Place
    marks: Mapping[int, Any]  # by rank: equal for equal tensors

    def odd(self) -> tuple[Group, Group]:
        """Return the ranks that differ from the majority, and the majority; of two, the second is the odd one."""
        groups: dict[Any, list[int]] = {}
        for rank, mark in sorted(self.marks.items()):
            groups.setdefault(mark, []).append(rank)
        majority = max(groups.values(), key=len)
        return tuple(rank for rank in sorted(self.marks) if rank not in majority), tuple(majority)


@rule("replicas_differ", severity="error", needs=_STAGES)
def replicas_differ(history: RunHistory) -> Iterator[Finding]:
    """Parameters, gradients, updates or buffers that should be equal on data-parallel ranks are not.

    Ranks that recorded a placement say themselves what they share. Of other ranks those are taken for replicas that
    began with the same parameters, but for a few. Contents are compared by `tt.hash()` where it was kept, else by all
    statistics. Only the first step and stage at which replicas part is named: all else follows from it.
    """
    if len(history.snapshot.ranks) < 2:
        raise NoData("only one rank recorded")
    found = list(_differing(history))
    first = min(((copies.step, _STAGES.index(copies.place.port)) for copies in found), default=None)
    if first is None:
        return
    wrong = [copies for copies in found if (copies.step, _STAGES.index(copies.place.port)) == first]
    last = max(copies.step for copies in found)
    steps = Steps(first[0], last, len({copies.step for copies in found}))
    for copies in wrong[:_SHOWN]:
        odd, majority = copies.odd()
        known = len(odd) < len(majority)
        which = f"rank {_listed(odd)} differs from rank {_listed(majority)}"
        more = f" So do {len(wrong) - 1} more at this step." if len(wrong) > 1 else ""
        yield Finding(
            "", "", str(copies.place), steps,
            {"step": copies.step, "rank": odd[0], "ranks": list(odd), "majority": known, "sites": len(wrong)},
            f"It should be the same on every replica and is not: from step {copies.step} on {which}.{more}",
            "Look at what this rank does alone before that step: loading, a skipped reduction, its own learning rate "
            "or seed, a stale copy, a faulty host.",
        )  # fmt: skip


def _differing(history: RunHistory) -> Iterator[_Copies]:
    rows = _rows(history, _STAGES)
    said = queries.shards(history.snapshot)
    known = {rank: {name: _group_of(shard) for name, shard in of.items()} for rank, of in said.items()}
    alike = _alike_at_first(rows)
    settled: dict[tuple[Place, Any], bool] = {}
    for (step, place), marks in rows.items():
        for key, group in _replicas(place, marks, known, alike):
            same = len({marks[rank] for rank in group}) < 2
            equal_before = settled.setdefault((place, key), same)
            if place.port == "buffer" and not equal_before:
                continue  # running statistics that each rank keeps for itself
            if not same:
                yield _Copies(step, place, {rank: marks[rank] for rank in group})


def _rows(history: RunHistory, ports: Sequence[str]) -> dict[tuple[int, Place], dict[int, Any]]:
    """Return what ranks recorded, by step and place, in order of steps."""
    found: dict[tuple[int, Place], dict[int, Any]] = {}
    for port in ports:
        table = history.table(ports=port)
        names = [name for name in ("hash", *_EXACT) if name in table.column_names]
        columns = [
            table[name].to_pylist() for name in ("step", "rank", "site", "port", "slot", "call", "shape", *names)
        ]
        for step, rank, site, of, slot, call, shape, *numbers in zip(*columns, strict=True):
            hashed = names[0] == "hash" and numbers[0] is not None
            mark = numbers[0] if hashed else tuple(numbers)
            constant = numbers[names.index("min")] == numbers[names.index("max")]
            found.setdefault((step, Place(site, of, slot)), {})[rank] = _Mark(call, tuple(shape or ()), mark, constant)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def _group_of(shard: Mapping[str, Any]) -> Any:
    """Return what is equal for ranks that hold the same piece; None for a piece that no other rank has."""
    if "R" not in shard["placements"] or shard["summand"]:
        return None
    kept = [at for at, how in zip(shard["at"], shard["placements"], strict=True) if how != "R"]
    return (tuple(shard["mesh"].items()), tuple(shard["ranks"]), tuple(kept))


def _replicas(
    place: Place, marks: Mapping[int, Any], known: Mapping[int, Mapping[str, Any]], alike: Sequence[Group]
) -> Iterator[tuple[Any, Group]]:
    """Yield the groups of ranks that should hold the same at a place."""
    said = {rank: known.get(rank, {}).get(str(place), False) for rank in marks}
    groups: dict[Any, list[int]] = {}
    for rank, key in said.items():
        if key is not None and key is not False:
            groups.setdefault(key, []).append(rank)
    unsaid = {rank for rank, key in said.items() if key is False}
    for number, group in enumerate(alike):
        groups.setdefault(number, []).extend(rank for rank in group if rank in unsaid)
    yield from ((key, tuple(sorted(ranks))) for key, ranks in groups.items() if len(ranks) > 1)


def _alike_at_first(rows: Mapping[tuple[int, Place], Mapping[int, Any]]) -> list[Group]:
    """Return the ranks that began with the same parameters, but for a few: more than half of those that vary."""
    steps = [step for step, place in rows if place.port == "param"]
    if not steps:
        return []
    first = [marks for (step, place), marks in rows.items() if step == steps[0] and place.port == "param"]
    ranks = sorted({rank for marks in first for rank in marks})
    groups: list[list[int]] = []
    for rank in ranks:
        home = next((group for group in groups if _share(first, group[0], rank) > 0.5), None)
        if home is None:
            groups.append([rank])
        else:
            home.append(rank)
    return [tuple(group) for group in groups if len(group) > 1]


def _share(first: Sequence[Mapping[int, Any]], one: int, other: int) -> float:
    both = [(marks[one], marks[other]) for marks in first if one in marks and other in marks]
    varied = [pair for pair in both if not pair[0].constant]
    return sum(a == b for a, b in varied) / len(varied) if varied else 0.0


@rule("rank_outlier", needs=_VALUES)
def rank_outlier(
    history: RunHistory, *, factor: float = 1.5, spread: float = 8.0, least: int = 3, share: float = 0.8
) -> Iterator[Finding]:  # fmt: skip
    """One data-parallel rank's values are apart from all others': a bad data shard, a bad host.

    The size (root mean square) of the same tensor is compared between ranks in each step. A rank is apart when it is
    `factor` times and `spread` times the others' own spread away from their median, on one side, in a `share` of at
    least `least` steps. It takes three ranks: of two, neither is the odd one.
    """
    mesh = mesh_of(history.snapshot.ranks, queries.shards(history.snapshot), None)
    if len(history.snapshot.ranks) < 3:
        raise NoData("it takes three ranks to tell which one is apart")
    if set(mesh.sides) == {"rank"}:
        groups = [set(group) for group in _alike_at_first(_rows(history, ("param",)))]
    else:
        lines: dict[Any, set[int]] = {}
        for rank in history.snapshot.ranks:
            at = mesh.coordinates(rank)
            lines.setdefault(tuple(at[s] for s in mesh.sides if s not in mesh.data), set()).add(rank)
        groups = list(lines.values())
    apart: dict[int, list[tuple[Place, float, list[int]]]] = {}
    for group in (group for group in groups if len(group) > 2):
        for place, sizes in _sizes(history, group).items():
            for rank, ratio, steps in _outlier(sizes, factor, spread, least, share):
                apart.setdefault(rank, []).append((place, ratio, steps))
    for rank, places in sorted(apart.items()):
        place, ratio, steps = places[0]
        yield Finding(
            "", "", str(place), Steps(steps[0], steps[-1], len(steps)),
            {"rank": rank, "ratio": ratio, "sites": len(places)},
            f"Rank {rank} is apart from all others: its values are {ratio:.3g} times as large as theirs, here and at "
            f"{len(places) - 1} more sites.",
            "Look at what this rank reads (its shard of the data, its preprocessing), then at its host.",
        )  # fmt: skip


def _sizes(history: RunHistory, group: set[int]) -> dict[Place, dict[int, dict[int, float]]]:
    """Return the root mean square by place, step and rank, where every rank of the group has one."""
    found: dict[Place, dict[int, dict[int, list[float]]]] = {}
    for port in _VALUES:
        table = history.table(ports=port, columns=["step", "rank", "site", "port", "slot", "l2", "numel", "dtype"])
        names = ("step", "rank", "site", "port", "slot", "l2", "numel", "dtype")
        for step, rank, site, of, slot, l2, numel, dtype in zip(*(table[n].to_pylist() for n in names), strict=True):
            if rank in group and l2 and numel and dtype.startswith(("float", "bfloat")):
                of_step = found.setdefault(Place(site, of, slot), {}).setdefault(step, {})
                of_step.setdefault(rank, []).append(math.log(l2 / math.sqrt(numel)))
    order = {place._replace(op=""): i for i, place in reversed(list(enumerate(history.places)))}
    return {
        place: {s: {r: float(np.mean(v)) for r, v in of.items()} for s, of in steps.items() if set(of) == group}
        for place, steps in sorted(found.items(), key=lambda item: order.get(item[0], len(order)))
    }


def _outlier(
    sizes: Mapping[int, Mapping[int, float]], factor: float, spread: float, least: int, share: float
) -> Iterator[tuple[int, float, list[int]]]:
    away: dict[int, list[tuple[int, float]]] = {}
    for step, of in sizes.items():
        for rank, size in of.items():
            others = np.array([x for r, x in of.items() if r != rank])
            middle = float(np.median(others))
            limit = max(math.log(factor), spread * float(np.abs(others - middle).max()))
            if abs(size - middle) > limit:
                away.setdefault(rank, []).append((step, size - middle))
    for rank, found in away.items():
        sides = Counter(gap > 0 for _, gap in found).most_common(1)[0]
        if len(found) >= least and sides[1] >= share * len(sizes):
            yield rank, math.exp(float(np.median([gap for _, gap in found]))), [step for step, _ in found]


def _listed(ranks: Group) -> str:
    return ", ".join(map(str, ranks))
