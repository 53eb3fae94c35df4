"""Rules on ranks: replicas that are no longer the same, and one rank whose values are apart from all others'."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import NoData, rule
from tensortap.distributed.agreement import (
    MISSING,
    ReplicaCheck,
    ReplicaMark,
    UnequalReplicas,
    alike_at_first,
    group_of,
    listed,
)
from tensortap.distributed.mesh import mesh_of
from tensortap.finding import Finding, Steps
from tensortap.reduce.statistics import BOUNDED, COUNTS
from tensortap.select.ports import MEMBER_PORTS
from tensortap.store import queries
from tensortap.types import Place

_EXACT: Final = (*BOUNDED, *COUNTS, "numel")
_STAGES: Final = MEMBER_PORTS
_VALUES: Final = ("input", "output", "grad_output")
_SHOWN: Final = 8


@rule("replicas_differ", severity="error", needs=_STAGES)
def replicas_differ(history: RunHistory) -> Iterator[Finding]:
    """Parameters, gradients, updates or buffers that should be equal on data-parallel ranks are not.

    Ranks that recorded a placement say themselves what they share. Other ranks are taken for replicas if they began
    with the same parameters, except for a few. Contents are compared by `tt.content_hash()` where it was kept, else
    by all statistics. Only the first step and stage at which replicas part is named: all else follows from it. A buffer
    that differs in every step is each rank's own, such as a count of the rows that it has seen. An update that
    differs does not count if the parameters of the next step are equal: ZeRO-1 may send it after the optimizer's step.
    """
    if len(history.snapshot.ranks) < 2:
        raise NoData("only one rank recorded")
    _exchange_something(history)
    check = ReplicaCheck()
    recorded = _steps(history, _STAGES)
    found = [(step, one) for step, places in recorded.items() for one in check.unequal(places)]
    apart = Counter(one.place for _, one in found if one.place.port == "buffer")
    own = {place for place, count in apart.items() if count == sum(place in places for places in recorded.values())}
    later = _arrived_later(found, recorded)
    found = [(step, one) for step, one in found if one.place not in own and (step, one.place) not in later]
    first = min(((step, _STAGES.index(one.place.port)) for step, one in found), default=None)
    if first is None:
        return
    wrong = [one for step, one in found if (step, _STAGES.index(one.place.port)) == first]
    steps = Steps(first[0], max(step for step, _ in found), len({step for step, _ in found}))
    for one in wrong[:_SHOWN]:
        odd, majority = one.odd()
        more = f" So do {len(wrong) - 1} more at this step." if len(wrong) > 1 else ""
        absent = all(one.marks[rank].content == MISSING for rank in odd)
        how = f"rank {listed(odd)} has none, rank {listed(majority)} has" if absent else (
            f"rank {listed(odd)} differs from rank {listed(majority)}"
        )  # fmt: skip
        yield Finding(
            "", "", str(one.place), steps,
            {"step": first[0], "rank": odd[0], "ranks": list(odd), "majority": len(odd) < len(majority),
             "sites": len(wrong)},
            f"It should be the same on every replica and is not: from step {first[0]} on {how}.{more}",
            "Look at what this rank does alone before that step: loading, a skipped reduction, its own learning rate "
            "or seed, a stale copy, a faulty host.",
        )  # fmt: skip


def _arrived_later(
    found: Sequence[tuple[int, UnequalReplicas]], recorded: Mapping[int, Mapping[Place, Mapping[int, ReplicaMark]]]
) -> set[tuple[int, Place]]:
    """Return updates that differ and were sent after the optimizer's step, by step and place.

    They show in the parameters of the next step; in the last one, those that came later before.
    """
    steps, later = list(recorded), set[tuple[int, Place]]()
    following = dict(itertools.pairwise(steps))
    for step, one in found:
        if one.place.port != "update" or any(mark.content == MISSING for mark in one.marks.values()):
            continue  # a rank that did not step is sent nothing
        if step in following:
            marks = recorded[following[step]].get(one.place._replace(port="param"), {})
            arrived = len({marks[rank].content if rank in marks else rank for rank in one.marks}) == 1
        else:
            arrived = any(place == one.place for _, place in later)
        if arrived:
            later.add((step, one.place))
    return later


def _exchange_something(history: RunHistory) -> None:
    """Refuse ranks that were started together and have no process group: nothing of theirs should be equal."""
    if history.snapshot.run_json.get("independent"):
        raise NoData("the ranks had no process group, so they are not replicas")


def _steps(history: RunHistory, ports: Sequence[str]) -> dict[int, dict[Place, dict[int, ReplicaMark]]]:
    """Return what ranks recorded, by step, place and rank, in order of steps."""
    said = queries.shards(history.snapshot)
    groups = {rank: {name: group_of(shard) for name, shard in of.items()} for rank, of in said.items()}
    found: dict[int, dict[Place, dict[int, ReplicaMark]]] = {}
    for port in ports:
        table = history.table(ports=port)
        names = [name for name in ("hash", *_EXACT) if name in table.column_names]
        columns = [
            table[name].to_pylist() for name in ("step", "rank", "site", "port", "slot", "call", "shape", *names)
        ]
        for step, rank, site, of, slot, call, shape, *numbers in zip(*columns, strict=True):
            place = Place(site, of, slot)
            hashed = names[0] == "hash" and numbers[0] is not None
            content = (call, tuple(shape or ()), numbers[0] if hashed else tuple(numbers))
            constant = numbers[names.index("min")] == numbers[names.index("max")]
            mark = ReplicaMark(content, groups.get(rank, {}).get(str(place)), constant)
            found.setdefault(step, {}).setdefault(place, {})[rank] = mark
    return dict(sorted(found.items()))


@rule("rank_outlier", needs=_VALUES)
def rank_outlier(
    history: RunHistory, *, factor: float = 1.5, spread: float = 8.0, least: int = 3, share: float = 0.8
) -> Iterator[Finding]:  # fmt: skip
    """One data-parallel rank's values are apart from all others': a bad data shard, a bad host.

    The size (root mean square) of the same tensor is compared between ranks in each step. A rank is apart when it is
    `factor` times and `spread` times the others' own spread away from their median, on one side, in a `share` of at
    least `least` steps. It takes three ranks: of two, neither is the odd one. Ranks that have other tokens of a row,
    as context-parallel ones do, are not compared: the model is given other positions there, the same in every step.
    """
    mesh = mesh_of(history.snapshot.ranks, queries.shards(history.snapshot), None)
    if len(history.snapshot.ranks) < 3:
        raise NoData("it takes three ranks to tell which one is apart")
    _exchange_something(history)
    if set(mesh.sides) == {"rank"}:
        groups = [set(group) for group in alike_at_first(_steps(history, ("param",)))]
    else:
        lines: dict[Any, set[int]] = {}
        for rank in history.snapshot.ranks:
            at = mesh.coordinates(rank)
            lines.setdefault(tuple(at[s] for s in mesh.sides if s not in mesh.data), set()).add(rank)
        groups = list(lines.values())
    apart: dict[int, list[tuple[Place, float, list[int]]]] = {}
    positions = _positions(history)
    groups = [{r for r in of if positions.get(r) == p} for of in groups for p in {positions.get(r) for r in of}]
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


def _positions(history: RunHistory) -> dict[int, Any]:
    """Return by rank the integers that the model is given unchanged in every step while other inputs change."""
    names = ("step", "rank", "site", "slot", "call", "dtype", "min", "max", "mean")
    table = history.table(ports="input", columns=list(names))
    given: dict[int, dict[str, set[Any]]] = {}
    steps: dict[int, set[int]] = {}
    for step, rank, site, slot, call, dtype, *numbers in zip(*(table[n].to_pylist() for n in names), strict=True):
        if not site and not call:
            given.setdefault(rank, {}).setdefault(slot, set()).add((dtype, *numbers))
            steps.setdefault(rank, set()).add(step)
    found = {}
    for rank, slots in given.items():
        fixed = {slot: next(iter(of)) for slot, of in slots.items() if len(of) == 1}
        ints = {slot: of for slot, of in fixed.items() if str(of[0]).startswith(("int", "uint"))}
        found[rank] = tuple(sorted(ints.items())) if len(fixed) < len(slots) and len(steps[rank]) > 1 else ()
    return found


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
