"""Take a snapshot of a run once per request and pass it down, so that all parts of an answer are of one moment."""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from tensortap.store import names as layout
from tensortap.store.catalog import (
    Catalog,
    Outline,
    RankFiles,
    TensorFiles,
    expanded,
    plain_rows,
    steps_by_phase,
    tail_outline,
)
from tensortap.store.claim import is_locked
from tensortap.store.files import retry_if_moved
from tensortap.store.rank_state import read_state
from tensortap.store.tail_reader import (
    EVENT_ROWS,
    METRIC_ROWS,
    RECORD_ROWS,
    TENSOR_ROWS,
    RowKind,
    TailContent,
    read_tail,
)
from tensortap.types import Place

State = Literal["live", "finished", "crashed"]
Triple = tuple[str, str, str]  # site, port, slot
T = TypeVar("T")


class Snapshot:
    """The files of a run at one moment, and their content: ranks, places, steps, counts.

    A snapshot does not change: a tail is read up to the length it had. What takes another listing or reading (metrics,
    tensors, the ranks' own files) is read when first asked for; `version` reads all of it. A file that was removed
    meanwhile raises FileNotFoundError: take another snapshot, as `Snapshots.read` does.
    """

    def __init__(self, catalog: Catalog, info: dict[str, Any], tails: TailCache) -> None:
        self.catalog = catalog
        self.files = catalog.files
        self.run_json = info
        self.ranks = catalog.ranks()
        self.records = [catalog.records(rank) for rank in self.ranks]
        self._lengths = _lengths(self.records)
        self._tail_cache = tails
        self.phase = ""  # the only phase whose rows are read; "": all
        self._of_phase: dict[str, Snapshot] = {}

    def of_phase(self, phase: str) -> Snapshot:
        """Return the same files restricted to the rows of one phase: its steps and its rows of tails.

        Places keep their numbers; who reads segments asks for rows of `snapshot.phase`.
        """
        if not phase or phase == self.phase:
            return self
        if phase not in self._of_phase:
            _ = self.rows  # places and their numbers are those of the whole run
            restricted = copy.copy(self)
            for name in ("tails", "steps"):
                restricted.__dict__.pop(name, None)
            restricted.phase = phase
            self._of_phase[phase] = restricted
        return self._of_phase[phase]

    @cached_property
    def phases(self) -> list[str]:
        """The phases that have records."""
        return sorted({phase for outline in self.outlines for phase in outline.phases if phase})

    @cached_property
    def metrics(self) -> list[RankFiles]:
        """The files that hold metrics, by rank."""
        found = [self.catalog.metrics(rank) for rank in self.ranks]
        self._lengths |= _lengths(found)
        return found

    @cached_property
    def events(self) -> list[RankFiles]:
        """The files that hold events, by rank."""
        found = [self.catalog.events(rank) for rank in self.ranks]
        self._lengths |= _lengths(found)
        return found

    @cached_property
    def tensors(self) -> list[TensorFiles]:
        """The files that hold tensors, by rank."""
        found = [self.catalog.tensors(rank) for rank in self.ranks]
        self._lengths |= {path: path.stat().st_size for files in found for path in files.tails}
        return found

    @cached_property
    def rank_states(self) -> list[dict[str, Any]]:
        """The content of each rank's `_rank.json`; empty if it cannot be read."""
        return [_rank_state(self, rank) for rank in self.ranks]

    @cached_property
    def state(self) -> State:
        """Whether the run is being written, was closed, or its process is gone without closing it."""
        if any(is_locked(self.files.staging() / layout.rank_folder(rank)) for rank in self.ranks):
            return "live"
        return "finished" if all(said.get("state") == "finished" for said in self.rank_states) else "crashed"

    @cached_property
    def version(self) -> str:
        """A text that differs whenever anything that can be read has changed."""
        rows = [name for files in (*self.records, *self.metrics, *self.events) for name in files.segments]
        tensors = [name for files in self.tensors for name in files.names]
        seen = (self.state, rows, tensors, sorted(map(str, self._lengths.items())), self.rank_states)
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    @cached_property
    def tails(self) -> dict[Path, Any]:
        """The rows of the tails of records, as they were written."""
        tables = self._read(self.records, RECORD_ROWS)
        if not self.phase:
            return tables
        only = {path: table.filter(pc.equal(table["phase"], self.phase)) for path, table in tables.items()}
        return {path: table for path, table in only.items() if len(table)}

    @cached_property
    def outlines(self) -> list[Outline]:
        """The outline of each file of records."""
        sealed = [outline for files in self.records for outline in files.segments.values()]
        return sealed + [tail_outline(table) for table in self.tails.values()]

    @cached_property
    def places(self) -> list[Place]:
        """Every place, in order of execution."""
        first: dict[Place, int] = {}
        # Segments of one run mostly share one list of places: each is gone through once.
        for places in {id(outline.places): outline.places for outline in self.outlines}.values():
            for site, port, slot, op, seq, _ in places:
                place = Place(site, port, slot, op)
                first[place] = min(seq, first.get(place, seq))
        return sorted(first, key=lambda place: (first[place], place))

    @cached_property
    def rows(self) -> dict[Triple, int]:
        """The number of each place in order of execution, whatever its operation was."""
        triples = dict.fromkeys((place.site, place.port, place.slot) for place in self.places)
        return {triple: row for row, triple in enumerate(triples)}

    @cached_property
    def steps(self) -> npt.NDArray[np.int64]:
        """The steps that have records, in order."""
        if self.phase:
            return phase_steps(self).get(self.phase, np.zeros(0, np.int64))
        return expanded(list({found for outline in self.outlines for found in outline.steps}))

    @cached_property
    def record_count(self) -> int:
        """How many records there are."""
        return sum(outline.rows for outline in self.outlines)

    def tail_rows(self, found: Iterable[RankFiles], schema: Any) -> list[Any]:
        """Return the rows of tails in a plain schema, one table for each tail."""
        files = list(found)
        tables = self._read(files, _kind_of(schema))
        return [plain_rows(tables[p], of.rank, schema) for of in files for p in of.tails if p in tables]

    def tensor_rows(self, path: Path) -> Any:
        """Return the rows of a tail of tensors; None when it has none yet."""
        return self._tail(path, TENSOR_ROWS)

    def _read(self, found: Iterable[RankFiles], kind: RowKind) -> dict[Path, Any]:
        tables = {path: self._tail(path, kind) for files in found for path in files.tails}
        return {path: table for path, table in tables.items() if table is not None}

    def _tail(self, path: Path, kind: RowKind) -> Any:
        content = self._tail_cache.read(path, self._lengths[path], kind)
        if content.damaged:
            self.catalog.mark_damaged(path, "it cannot be read to its end")
        return content.table


def phase_steps(snapshot: Snapshot) -> dict[str, npt.NDArray[np.int64]]:
    """Return the steps of each phase that have records, in order; steps without a known phase have an empty name."""
    parts = [
        snapshot.catalog.steps_by_phase(name, outline)
        for files in snapshot.records
        for name, outline in files.segments.items()
    ]
    parts += [steps_by_phase(table) for table in snapshot.tails.values()]
    names = sorted({phase for part in parts for phase in part})
    found = {name: np.unique(np.concatenate([part[name] for part in parts if name in part])) for name in names}
    return {name: steps for name, steps in found.items() if len(steps)}


def _lengths(found: Iterable[RankFiles]) -> dict[Path, int]:
    return {path: path.stat().st_size for files in found for path in files.tails}


def _kind_of(schema: Any) -> RowKind:
    return METRIC_ROWS if "value" in schema.names else EVENT_ROWS if "kind" in schema.names else RECORD_ROWS


def _rank_state(snapshot: Snapshot, rank: int) -> dict[str, Any]:
    name = f"{layout.rank_folder(rank)}/{layout.RANK_JSON}"
    try:
        state, wrong = read_state(snapshot.files.read(name))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        snapshot.catalog.mark_damaged(name, error)
        return {}
    if wrong:
        snapshot.catalog.mark_damaged(name, wrong)
    return state


class TailCache:
    """Remember the rows of tails as long as they do not grow."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Path, int], TailContent] = {}

    def read(self, path: Path, length: int, kind: RowKind) -> TailContent:
        """Return the whole batches in the first `length` bytes of a tail."""
        key = (path, length)
        known = self._tables.get(key)
        if known is None:
            known = read_tail(path, kind, length)
            for old in [other for other in self._tables if other[0] == path]:
                self._tables.pop(old, None)
            self._tables[key] = known
        return known

    def prune(self) -> None:
        """Forget the tails that are there no longer."""
        self._tables = {key: table for key, table in self._tables.items() if key[0].exists()}


class Snapshots:
    """Take snapshots of one run. What has not changed since the last one is not read again."""

    def __init__(self, catalog: Catalog, info: dict[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._info = info
        self._clock = clock
        self._tails = TailCache()
        self._lock = threading.Lock()
        self._last: Snapshot | None = None
        self._taken = 0.0

    def take(self, max_age: float = 0.0, *, whole: bool = False) -> Snapshot:
        """Return the run as it is now, or as it was at most `max_age` seconds ago.

        With `whole`, a new snapshot lists metrics, events and tensors now, instead of when they are first asked for.
        """
        with self._lock:
            if self._last is None or not max_age or self._clock() - self._taken >= max_age:
                self._last = retry_if_moved(lambda: self._new(compare=max_age > 0, whole=whole))
                self._taken = self._clock()
            return self._last

    def forget(self) -> None:
        """Take a new snapshot the next time: a file of the last one is gone, sealed or compacted into another."""
        with self._lock:
            self._last = None

    def read(self, ask: Callable[[Snapshot], T], max_age: float = 0.0, *, whole: bool = False) -> T:
        """Return what `ask` reads from a snapshot; when a file of it is gone meanwhile, from another one."""
        ages = iter([max_age])
        return retry_if_moved(lambda: ask(self.take(next(ages, 0.0), whole=whole)))

    def _new(self, *, compare: bool, whole: bool) -> Snapshot:
        self._tails.prune()
        new, last = Snapshot(self._catalog, self._info, self._tails), self._last
        if whole:
            _ = new.version  # lists all there is
        if compare and last is not None and last.version == new.version:
            return last  # with everything that was read of it
        return new
