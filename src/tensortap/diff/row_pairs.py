"""Pair the rows of two runs as arrays, file by file: runs of any length pass through memory in chunks.

Each rank is read by itself, in order of steps. A chunk holds the steps whose rows have all been read on both sides; the
rows of later steps wait for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from tensortap.diff.phases import PhaseStep, StepPair
from tensortap.reduce.statistics import COUNTS
from tensortap.store.arrays import Ints, array_of, encoded, per_run
from tensortap.store.blocks import BlockSource, PerPlace, RowBlock, ahead, read_block, sources
from tensortap.store.snapshot import Snapshot, phase_steps
from tensortap.types import DTYPE_CODE, Place

Array = npt.NDArray[Any]
_KEYS: Final = ("index", "site", "call", "seq", "source", "row")
_READERS: Final = 2
_ROWS_AT_ONCE: Final = 1 << 15
_NO_MORE: Final = 1 << 62
_CALLS: Final = 1 << 12  # beyond so many calls of a site in a step, calls are numbered


@dataclass(frozen=True, slots=True, eq=False)
class SideRows:
    """Rows of one run. `index` numbers the pairs of steps, `site` the pairs of places; `row` is that in the source."""

    index: Ints
    site: Ints
    call: Ints
    seq: Ints
    source: Ints
    row: Ints
    columns: dict[str, Array]

    def at(self, rows: Any) -> SideRows:
        """Return some of the rows."""
        keys = {name: getattr(self, name)[rows] for name in _KEYS}
        return SideRows(**keys, columns={name: column[rows] for name, column in self.columns.items()})


@dataclass(frozen=True, eq=False)
class RowPairs:
    """Rows of both runs that belong together, by step, site and call; and how many have no partner."""

    rank: int
    a: SideRows
    b: SideRows
    alone_a: int
    alone_b: int

    def __len__(self) -> int:
        return len(self.a.index)

    @cached_property
    def position(self) -> Ints:
        """Where each pair stands in the order of execution of the first run, within its rank."""
        return self.a.index << 32 | self.a.seq


class RunPair:
    """Two runs with paired steps and places, and readers of their rows."""

    def __init__(self, a: Snapshot, b: Snapshot, both: Sequence[StepPair], partners: Mapping[Place, Place]) -> None:
        self.snapshots = a, b
        self.both = both
        self.places = tuple(partners.items())
        self._by_phase = any(_share_numbers(run) for run in (a, b))
        self._steps = tuple(_StepIndex([pair[side] for pair in both], self._by_phase) for side in (0, 1))
        self._sites = tuple({pair[side]: i for i, pair in enumerate(self.places)} for side in (0, 1))
        self.sources = tuple([s for s in sources(run) if self._steps[side].has(s)] for side, run in enumerate((a, b)))
        self.same_folder = a.files.path() == b.files.path()

    @property
    def ranks(self) -> list[int]:
        """The ranks that have rows in either run."""
        return sorted({source.rank for found in self.sources for source in found})

    def chunks(self, rank: int, columns: Sequence[str]) -> Iterator[RowPairs]:
        """Yield the pairs of one rank, in order of steps."""
        with ThreadPoolExecutor(_READERS, "tensortap-diff") as pool:
            once = _ReadOnce() if self.same_folder else None
            sides = [self._reader(side, rank, columns, pool, once) for side in (0, 1)]
            while True:
                limit = min(side.next_index for side in sides)
                while limit < _NO_MORE and min(side.waiting for side in sides) < _ROWS_AT_ONCE:
                    for side in sides:
                        if side.next_index == limit:
                            side.advance()
                    limit = min(side.next_index for side in sides)
                yield _joined(rank, *(side.take(limit) for side in sides))
                if limit == _NO_MORE:
                    return

    def _reader(
        self, side: int, rank: int, columns: Sequence[str], pool: ThreadPoolExecutor, once: _ReadOnce | None
    ) -> _SideReader:
        steps, snapshot = self._steps[side], self.snapshots[side]
        wanted = [(i, source) for i, source in enumerate(self.sources[side]) if source.rank == rank]
        wanted.sort(key=lambda item: steps.first_index(item[1]))
        phase = ("phase",) if self._by_phase else ()
        sites = self._sites[side]
        site_of = PerPlace(lambda place: sites.get(place._replace(op=""), -1), np.int64)

        def load(item: tuple[int, BlockSource]) -> RowBlock | None:
            def read() -> RowBlock | None:
                return read_block(snapshot, item[1], ("call", "recomputed", *phase, *columns))

            return read() if once is None else once(item[1].name, read)

        def read(item: tuple[int, BlockSource]) -> SideRows | None:
            block = load(item)
            return None if block is None else _side_rows(block, item[0], steps, site_of, columns)

        return _SideReader(ahead(pool, read, wanted, _READERS), [steps.first_index(source) for _, source in wanted])


def _share_numbers(run: Snapshot) -> bool:
    """Return whether steps of several phases have one number."""
    return sum(map(len, phase_steps(run).values())) > len(run.steps)


class _StepIndex:
    """Numbers the steps of one side by their pairs; by their phases too, where those have numbers of their own."""

    def __init__(self, steps: Sequence[PhaseStep], by_phase: bool) -> None:
        self._phases = {phase: i for i, phase in enumerate(sorted({at.phase for at in steps}))} if by_phase else {}
        self._many = max(len(self._phases), 1)
        keys = np.array([at.step * self._many + self._phases.get(at.phase, 0) for at in steps], np.int64)
        self._index = np.argsort(keys, kind="stable")
        self._keys = keys[self._index]

    def of(self, block: RowBlock) -> Ints:
        """Return the number of each row's step, -1 for those that are not compared."""
        step = block.number("step")
        if not self._phases:
            return per_run(self._index_of, step)
        phase = self._phase_of(block)
        return np.where(phase >= 0, per_run(self._index_of, step * self._many + phase), -1)

    def _index_of(self, keys: Ints) -> Ints:
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._index[at], -1)

    def _phase_of(self, block: RowBlock) -> Ints:
        """Return the number of each row's phase, -1 for phases that are not compared."""
        known = encoded(block.columns["phase"])
        codes = np.array([self._phases.get(word, -1) for word in known.dictionary.to_pylist()] or [-1], np.int64)
        return np.asarray(codes[array_of(known.indices)])

    def _within(self, source: BlockSource) -> Ints:
        bounds = source.first * self._many, (source.last + 1) * self._many
        return self._index[slice(*np.searchsorted(self._keys, bounds))]

    def has(self, source: BlockSource) -> bool:
        """Return whether a file may have rows of the steps that are compared."""
        return len(self._within(source)) > 0

    def first_index(self, source: BlockSource) -> int:
        """Return the first number that a file may have rows of."""
        return int(self._within(source).min())


class _SideReader:
    """Read the files of one side in order, and hand over the rows before a limit."""

    def __init__(self, blocks: Iterator[SideRows | None], starts: Sequence[int]) -> None:
        self._blocks = blocks
        self._starts = [*starts, _NO_MORE]
        self._read = 0
        self._held: list[SideRows] = []

    @property
    def next_index(self) -> int:
        """The first number that files not read yet may have rows of."""
        return self._starts[self._read]

    @property
    def waiting(self) -> int:
        """The number of rows in memory; infinite when everything was read."""
        return _NO_MORE if self.next_index == _NO_MORE else sum(len(rows.index) for rows in self._held)

    def advance(self) -> None:
        """Read one more file."""
        rows = next(self._blocks)
        self._read += 1
        if rows is not None and len(rows.index):
            self._held.append(rows)

    def take(self, limit: int) -> SideRows | None:
        """Return the rows whose numbers are below a limit."""
        taken, held = [], []
        for rows in self._held:
            before = rows.index < limit
            if before.all():
                taken.append(rows)
            else:
                held.append(rows.at(~before))
                if before.any():
                    taken.append(rows.at(before))
        self._held = held
        return _concatenated(taken) if taken else None


class _ReadOnce:
    """Let two sides that read the same file share what was read of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[str | Path, Future[Any]] = {}

    def __call__(self, name: str | Path, read: Callable[[], Any]) -> Any:
        with self._lock:
            known = self._read.pop(name, None)
            if known is None:
                mine = self._read[name] = Future()
        if known is not None:
            return known.result()
        try:
            mine.set_result(read())
        except BaseException as error:
            mine.set_exception(error)
        return mine.result()


def _side_rows(block: RowBlock, source: int, steps: _StepIndex, site_of: PerPlace, columns: Sequence[str]) -> SideRows:
    """Return the rows of a file that are compared: of paired steps and places, and not recomputed."""
    index = steps.of(block)
    site = site_of.of(block.places)[block.place]
    keep = (index >= 0) & (site >= 0)
    if "recomputed" in block.columns.column_names:
        keep &= ~block.number("recomputed").astype(bool)
    row = np.arange(len(block)) if block.rows is None else block.rows
    call, seq = (block.number(name).astype(np.int64) for name in ("call", "seq"))
    known = {name: column for wanted in columns for name, column in _column(block, wanted)}
    rows = SideRows(index, site, call, seq, np.broadcast_to(np.int64(source), len(block)), row, known)
    return rows if keep.all() else rows.at(keep)


def _column(block: RowBlock, name: str) -> Iterator[tuple[str, Array]]:
    """Yield a column as numbers: types by their codes, hashes with where there are any."""
    if name == "dtype":
        known = encoded(block.columns[name])
        codes = np.array([DTYPE_CODE.get(word, -1) for word in known.dictionary.to_pylist()] or [-1], np.int8)
        yield name, codes[array_of(known.indices)]
    elif name == "hash":
        present = name in block.columns.column_names
        yield "hashed", array_of(pc.is_valid(block.columns[name])) if present else np.zeros(len(block), bool)
        yield name, array_of(block.columns[name]) if present else np.zeros(len(block), np.int64)
    elif name in COUNTS and name not in block.columns.column_names:
        yield name, np.broadcast_to(np.int64(0), len(block))  # which takes no memory
    else:
        yield name, block.number(name)


def _concatenated(parts: Sequence[SideRows]) -> SideRows:
    if len(parts) == 1:
        return parts[0]
    keys = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _KEYS}
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    return SideRows(**keys, columns=columns)


def _joined(rank: int, a: SideRows | None, b: SideRows | None) -> RowPairs:
    """Pair rows by step, site and call. Among several with one key the first in order of execution counts."""
    if a is None or b is None:
        nothing = _EMPTY if (rest := b if a is None else a) is None else rest.at(slice(0, 0))
        alone = [0 if side is None else len(_unique(side, _codes(side)[0])[0]) for side in (a, b)]
        return RowPairs(rank, nothing, nothing, *alone)
    codes = _codes(a, b)
    (code_a, rows_a), (code_b, rows_b) = (_unique(side, code) for side, code in zip((a, b), codes, strict=True))
    if len(code_a) == len(code_b) and np.array_equal(code_a, code_b):
        return RowPairs(rank, _at(a, rows_a), _at(b, rows_b), 0, 0)
    common, in_a, in_b = np.intersect1d(code_a, code_b, assume_unique=True, return_indices=True)
    alone = [len(code) - len(common) for code in (code_a, code_b)]
    return RowPairs(rank, _at(a, rows_a, in_a), _at(b, rows_b, in_b), *alone)


_EMPTY: Final = SideRows(**{name: np.zeros(0, np.int64) for name in _KEYS}, columns={})


def _codes(*sides: SideRows) -> list[Ints]:
    """Return one number for the step, site and call of each row."""
    least = min(int(side.index.min()) for side in sides)
    sites = max(int(side.site.max()) for side in sides) + 1
    calls = [side.call for side in sides]
    if (size := max(int(call.max()) for call in calls) + 1) > _CALLS:
        known = np.unique(np.concatenate(calls))
        calls, size = [np.searchsorted(known, call) for call in calls], len(known)
    keys = zip(sides, calls, strict=True)
    return [((side.index - least) * sites + side.site) * size + call for side, call in keys]


def _unique(side: SideRows, code: Ints) -> tuple[Ints, Ints | None]:
    """Return the codes in order, none twice, and which rows have them; None for all rows as they are."""
    if bool((code[1:] > code[:-1]).all()):
        return code, None
    order = np.lexsort((side.seq, code))
    code = code[order]
    first = np.concatenate([[True], code[1:] != code[:-1]])
    return code[first], order[first]


def _at(side: SideRows, rows: Ints | None, chosen: Ints | None = None) -> SideRows:
    if rows is None:
        return side if chosen is None else side.at(chosen)
    return side.at(rows if chosen is None else rows[chosen])
