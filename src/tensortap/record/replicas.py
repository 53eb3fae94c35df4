"""Compare the hashes of a closing step with those of other ranks, for the trigger `desync`."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.distributed.agreement import ALONE, Marks, ReplicaCheck, ReplicaMark, group_of
from tensortap.distributed.hash_board import SLOTS, HashBoard, Rows
from tensortap.distributed.ranks import World
from tensortap.distributed.shards import Shard
from tensortap.errors import ProbeError
from tensortap.record.counters import Counters
from tensortap.record.table import Names, StepTable
from tensortap.reduce.content_hash import ABSENT
from tensortap.select.ports import MEMBER_PORTS
from tensortap.select.probes import Probe
from tensortap.types import Place

_UNSAID, _ALONE = 0, 1  # groups of which nothing was recorded, and of one rank's own
_UNSEEN: Final = 8  # after so many steps without a word from another rank, the user is told


class ReplicaMonitor:
    """Tells of a closing step whether replicas have come apart, in words; empty while they agree, or are not known.

    `board` is where ranks post their hashes for each other. Where rows are shared by an all-reduce, `take` is given
    what it brought, and the board is not used.
    """

    def __init__(self, world: World, board: HashBoard | None, counters: Counters) -> None:
        self._world = world
        self._board = board
        self._counters = counters
        self._check = ReplicaCheck()
        self._names: dict[int, Place] = {}
        self._waiting: deque[tuple[int, Rows]] = deque(maxlen=SLOTS)
        self._heard = {world.rank}
        self._steps = 0
        self._apart = False
        self._taken: tuple[int, dict[int, Rows]] | None = None

    def look(self, step: int, table: StepTable, names: Names) -> str:
        """Return which replicas are found to differ now, in this step or one before; empty when none are."""
        if self._world.size < 2:
            return ""
        table.wait()
        if self._taken is not None and self._taken[0] == step:
            return self._compared(*self._taken)
        rows = self.rows(table, names)
        if self._board is None or not len(rows):
            return ""
        self._board.post(step, rows)
        self._waiting.append((step, rows))
        self._steps += 1
        self._warn_if_alone()
        return next((said for said in self._read(self._board) if said), "")

    def take(self, step: int, rows: dict[int, Rows]) -> None:
        """Note what every rank has of a step, as an all-reduce brought it."""
        self._taken = (step, rows)

    def rows(self, table: StepTable, names: Names) -> Rows:
        """Return the hashes of what replicas may share, one row a place: name, hash, group, constant."""
        hashes, keys = table.column("hash"), table.column("key")
        constant = table.column("min") == table.column("max")
        found = []
        for row in np.flatnonzero((hashes != ABSENT) & ~table.column("recomputed")).tolist():
            place = names.places[keys[row]]
            if place.port in MEMBER_PORTS and not place.op:
                group = _group_number(names.parts.get(place))
                found.append((self._number(place), int(hashes[row]), group, int(constant[row])))
        return np.array(found, np.int64).reshape(-1, 4)

    def port(self, number: int) -> tuple[str, str]:
        """Return the site and port of a number in the rows."""
        return self._names[number][:2]

    def _number(self, place: Place) -> int:
        number = _digest(str(place))
        self._names[number] = place
        return number

    def _read(self, board: HashBoard) -> Iterator[str]:
        """Compare the steps that every rank has posted by now, the oldest first."""
        while self._waiting:
            step, own = self._waiting[0]
            found = {self._world.rank: own}
            for rank in range(self._world.size):
                posted = None if rank in found else board.read(rank, step)
                if rank not in found and (posted is None or posted.step < step):
                    return  # it is behind: later steps of it are not there either
                if posted is not None:
                    self._heard.add(rank)
                    found |= {rank: posted.rows} if posted.step == step else {}
            self._waiting.popleft()
            if len(found) == self._world.size:
                yield self._compared(step, found)
            else:  # a rank that is far ahead has written over it
                self._counters.add("uncompared_steps")

    def _compared(self, step: int, found: Mapping[int, Rows]) -> str:
        places = _by_place(found, self._names)
        unequal = list(self._check.unequal(places))
        before, self._apart = self._apart, bool(unequal)
        if not unequal or before:
            return ""
        first = min(unequal, key=lambda one: MEMBER_PORTS.index(one.place.port))
        more = f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""
        return f"{first}{more} at step {step}"

    def _warn_if_alone(self) -> None:
        if self._steps == _UNSEEN and len(self._heard) < self._world.size:
            missing = sorted(set(range(self._world.size)) - self._heard)
            self._counters.warn(
                "desync",
                f"desync() finds no hashes of rank {', '.join(map(str, missing[:4]))} beside those of rank "
                f"{self._world.rank}: ranks must write to one run folder on a file system they share, or use "
                "watch(..., global_stats=True)",
            )


def check_hashes(probes: Sequence[Probe]) -> bool:
    """Return whether a trigger compares replicas; raise where it does and no probe keeps hashes to compare."""
    asking = next((probe for probe in probes if probe.when.compares_replicas), None)
    if asking is None:
        return False
    hashed = [pattern for probe in probes if probe.hashed for pattern in probe.patterns]
    if not any(pattern.ports & set(MEMBER_PORTS) for pattern in hashed):
        raise ProbeError(
            f"when={asking.when} compares hashes of what ranks share, and no probe keeps any: add "
            "probe('**:param', '**:grad', keep=[stats(), content_hash()])"
        )
    return True


def _by_place(found: Mapping[int, Rows], names: Mapping[int, Place]) -> dict[Place, Marks]:
    """Return the marks of all ranks by place, in the order in which this rank recorded them."""
    places: dict[Place, dict[int, ReplicaMark]] = {place: {} for place in names.values()}
    for rank, rows in found.items():
        for number, content, group, constant in rows.tolist():
            if number in names:
                said = {_UNSAID: None, _ALONE: ALONE}.get(group, group)
                places[names[number]][rank] = ReplicaMark(content, said, bool(constant))
    return {place: marks for place, marks in places.items() if marks}


def _group_number(shard: Shard | None) -> int:
    if shard is None:
        return _UNSAID
    group = group_of(shard.as_json())
    return _ALONE if group == ALONE else _digest(repr(group))


def _digest(text: str) -> int:
    """Return 62 bits that are not those of the two special groups."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
    return number + 2


def halves(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return 64-bit numbers as pairs of floats of 32 bits each, which sums of zeros leave as they are."""
    words = np.ascontiguousarray(values, np.int64).view(np.uint64)
    return np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], -1).astype(np.float64)


def joined(pairs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the 64-bit numbers that `halves` split."""
    low, high = pairs[..., 0].astype(np.uint64), pairs[..., 1].astype(np.uint64)
    return (low | high << np.uint64(32)).view(np.int64)
