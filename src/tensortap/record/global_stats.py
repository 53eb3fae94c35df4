"""Combine the statistics of a step over all ranks, by one all-reduce when it closes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.distributed.ranks import World
from tensortap.errors import ProbeError
from tensortap.record.counters import Counters
from tensortap.record.recorder import OpenStep
from tensortap.record.replicas import ReplicaMonitor, halves, joined
from tensortap.record.table import Names, StepTable
from tensortap.reduce.merge import merge_groups
from tensortap.reduce.statistics import BY_NAME, NUMBERS, REGISTRY
from tensortap.select.probes import Probe
from tensortap.select.triggers import Answer

_HASH_NUMBERS: Final = 8
Doubles = npt.NDArray[np.float64]
Sum = Callable[[Doubles], Doubles]


class GlobalStats(Mapping[str, Mapping[str, float]]):
    """Statistics over all ranks of the last combined step, by `path:port`. Counts are exact.

    >>> stats = GlobalStats(3, ["fc:output"], {name: np.ones(1) for name in NUMBERS})
    >>> stats.step, stats["fc:output"]["mean"]
    (3, 1.0)
    """

    def __init__(self, step: int, names: Sequence[str], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self.step = step
        self._rows = {
            name: {column: _number(column, values[i]) for column, values in columns.items()}
            for i, name in enumerate(names)
            if columns["numel"][i]
        }

    def __getitem__(self, name: str) -> Mapping[str, float]:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<GlobalStats of step {self.step}: {len(self)} sites>"


class Sharing:
    """Combine a step's rows over all ranks.

    Every rank writes to its own slot of one array, so that the sum over ranks holds the rows of all of them, which are
    then merged as records are. Calls and slots of a port are merged first: which ones there are is not known
    beforehand, and all ranks must send the same number of rows.
    """

    def __init__(
        self, probes: Sequence[Probe], ports: Iterable[tuple[str, str]], world: World, total: Sum, counters: Counters,
        replicas: ReplicaMonitor | None = None,
    ) -> None:  # fmt: skip
        self.latest: GlobalStats | None = None
        self._probes = probes
        self._ports = {key: i for i, key in enumerate(sorted(ports))}
        self._world = world
        self._total = total
        self._counters = counters
        self._hashes = None if replicas is None else _SharedHashes(replicas, self._ports, world)
        self._agree()

    def share(self, step: OpenStep, names: Names) -> None:
        """Combine a closing step, if a probe wants it by its number: then all ranks do this in the same step."""
        if all(probe.when.before(step.number) is Answer.NO for probe in self._probes):
            return
        more = 0 if self._hashes is None else _HASH_NUMBERS
        packed = np.zeros((self._world.size, len(self._ports), len(NUMBERS) + more))
        try:
            self._pack(step.table, names, packed[self._world.rank, :, : len(NUMBERS)])
            if self._hashes is not None:
                self._hashes.pack(step.table, names, packed[self._world.rank, :, len(NUMBERS) :])
        except Exception as error:  # the other ranks are waiting: send zeros
            packed[:] = 0
            self._counters.failed("global_stats_errors", "packing rows for all ranks", error)
        rows = self._total(packed)
        self.latest = GlobalStats(step.number, [":".join(key) for key in self._ports], _merged(rows))
        if self._hashes is not None:
            self._hashes.take(step.number, rows[:, :, len(NUMBERS) :])

    def _pack(self, table: StepTable, names: Names, into: Doubles) -> None:
        port = np.array([self._port(names, key) for key in table.column("key").tolist()], np.int64)
        rows = np.flatnonzero((port >= 0) & ~table.column("recomputed"))
        if not len(rows):
            return
        rows = rows[np.argsort(port[rows], kind="stable")]
        used, starts = np.unique(port[rows], return_index=True)
        merged = merge_groups({name: table.column(name)[rows] for name in NUMBERS}, starts.astype(np.int64))
        into[used] = np.nan_to_num(np.stack([merged[name].astype(np.float64) for name in NUMBERS], axis=1))

    def _port(self, names: Names, key: int) -> int:
        place = names.places[key]
        shard = names.parts.get(place)
        counts = shard is None or not (shard.replica or shard.is_partial_sum)
        return self._ports.get((place.site, place.port), -1) if counts and not place.op else -1

    def _agree(self) -> None:
        """Raise at set-up when ranks would send different rows."""
        text = "\n".join(":".join(key) for key in self._ports) + repr([str(p.when) for p in self._probes])
        digest = float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))
        slots = np.zeros((self._world.size, 2))
        slots[self._world.rank] = digest, len(self._ports)
        answers = self._total(slots)
        if (other := np.flatnonzero((answers != answers[self._world.rank]).any(axis=1))).size:
            raise ProbeError(
                f"global_stats=True needs the same sites and triggers on every rank, and rank {other[0]} watches "
                f"{int(answers[other[0], 1])} places where rank {self._world.rank} watches {len(self._ports)}, or "
                "others; leave it out and use run.merged(over='ranks')"
            )


class _SharedHashes:
    """Sends the hashes of what replicas share along: of each port its name, hash and group in halves, and two marks."""

    def __init__(self, monitor: ReplicaMonitor, ports: Mapping[tuple[str, str], int], world: World) -> None:
        self._monitor, self._ports, self._world = monitor, ports, world

    def pack(self, table: StepTable, names: Names, into: Doubles) -> None:
        for row in self._monitor.rows(table, names):
            port = self._ports.get(self._monitor.port(int(row[0])), -1)
            if port >= 0:
                into[port] = [*halves(row[:3]).ravel(), row[3], 1.0]

    def take(self, step: int, rows: Doubles) -> None:
        """Hand over what every rank has sent."""
        found = {}
        for rank in range(self._world.size):
            sent = rows[rank][rows[rank, :, -1] == 1.0]
            numbers = joined(sent[:, :6].reshape(-1, 3, 2))
            found[rank] = np.concatenate([numbers, sent[:, 6:7].astype(np.int64)], axis=1)
        self._monitor.take(step, found)


def check(probes: Sequence[Probe], *, model: bool, all_ranks: bool, budget: bool) -> None:
    """Refuse options by which ranks could disagree about which steps to combine: they would wait for ever."""
    unscheduled = [str(probe.when) for probe in probes if not probe.when.agreed]
    if unscheduled:
        raise ProbeError(
            f"global_stats=True cannot go with when={unscheduled[0]}, which each rank answers for itself and "
            "only after the step: ranks that disagree would wait for each other for ever. Use every(), at(), "
            "between(), first(), powers_of(), chance() or desync(), and a second watch for the other probes"
        )
    for wrong, what in (
        (not model, "needs a model: tensortap.watch(model, ..., global_stats=True)"),
        (not all_ranks, "needs every rank to record; leave ranks= out"),
        (budget, "cannot go with budget=, by which each rank thins its own steps; use when=every(n)"),
    ):
        if wrong:
            raise ProbeError(f"global_stats=True {what}")


def _merged(rows: Doubles) -> dict[str, npt.NDArray[Any]]:
    """Merge the slots of all ranks, place by place. Slots without finite elements add nothing to the moments."""
    ranks, places = rows.shape[:2]
    flat = rows[:, :, : len(NUMBERS)].transpose(1, 0, 2).reshape(ranks * places, len(NUMBERS))
    columns = {name: flat[:, i].copy() for i, name in enumerate(NUMBERS)}
    finite = columns["numel"] - columns["nan"] - columns["posinf"] - columns["neginf"]
    for name in (s.name for s in REGISTRY if s.name in columns and s.defined != "always"):
        columns[name][finite == 0] = np.nan
    return merge_groups(columns, np.arange(places, dtype=np.int64) * ranks) if places else columns


def _number(column: str, value: Any) -> float:
    return int(value) if BY_NAME[column].is_count else float(value)
