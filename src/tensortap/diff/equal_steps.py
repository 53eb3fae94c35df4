"""Find the steps at which two runs hold the same rows, bit for bit: they need not be compared pair by pair."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.reduce.statistics import NUMBERS
from tensortap.store.blocks import BlockSource, Ints, ahead, array_of, encoded, numbers, places_in, sources
from tensortap.store.snapshot import Snapshot
from tensortap.types import Place

_WORDS: Final = ("site", "port", "slot", "dtype")
_PLAIN: Final = ("step", "call", "seq", "recomputed", "hist_offset", *NUMBERS)
_LISTS: Final = ("shape", "hist_counts")
_OF_ROWS: Final = (*_WORDS, "op", "step", "call", "recomputed")
_READERS: Final = 2


class EqualFile(NamedTuple):
    """A file whose rows the other run has too: of each pair its step, its place and its type."""

    rank: int
    steps: Ints
    places: tuple[Place, ...]
    place: Ints
    dtypes: tuple[str, ...]
    dtype: Ints


class EqualSteps:
    """The steps that are equal in two runs, and how many pairs each place has there.

    Left out is the first step of every place and of every type that a place has: those are compared as any other, so
    that there is a pair to show, and the tolerances that follow are the same.
    """

    def __init__(self, files: Sequence[EqualFile], steps: Collection[int]) -> None:
        self._files = files
        self.steps = set(steps) - _first_steps(files)

    def counts(self, steps: Sequence[int]) -> dict[Place, int]:
        """Return how many pairs each place has at some of the steps."""
        wanted, found = np.array(sorted(steps), np.int64), dict[Place, int]()
        for file in self._files:
            if len(file.steps) and len(wanted) and file.steps.min() <= wanted[-1] and file.steps.max() >= wanted[0]:
                of = np.bincount(file.place[np.isin(file.steps, wanted)], minlength=len(file.places))
                for place, count in zip(file.places, of.tolist(), strict=True):
                    if count:
                        found[place] = found.get(place, 0) + count
        return found


def equal_steps(a: Snapshot, b: Snapshot, steps: Sequence[int], partners: Mapping[Place, Place]) -> EqualSteps:
    """Return which of the steps hold the same rows in both runs, as far as whole files do."""
    if any(place != partner for place, partner in partners.items()):
        return EqualSteps([], ())
    others = {(s.rank, s.first, s.last): s for s in reversed(sources(b))}
    pairs = [(source, others.get((source.rank, source.first, source.last))) for source in sources(a)]

    def compare(pair: tuple[BlockSource, BlockSource | None]) -> EqualFile | None:
        source, other = pair
        if other is None or not _same_rows(a, b, source, other):
            return None
        return _rows_in(source, partners)

    with ThreadPoolExecutor(_READERS, "tensortap-diff") as pool:
        found = list(ahead(pool, compare, pairs, _READERS + 1))
    equal = [file for file in found if file is not None]
    matched = {id(other) for (_, other), file in zip(pairs, found, strict=True) if file is not None}
    rest = [source for (source, _), file in zip(pairs, found, strict=True) if file is None]
    rest += [source for source in sources(b) if id(others.get((source.rank, source.first, source.last))) not in matched]
    return EqualSteps(equal, _shared(equal, rest) & set(steps))


def _shared(equal: Sequence[EqualFile], rest: Sequence[BlockSource]) -> set[int]:
    """Return the steps that only equal files hold, and no two files of a rank."""
    seen: set[tuple[int, int]] = set()
    twice: set[int] = set()
    for file in equal:
        for step in np.unique(file.steps).tolist():
            if (file.rank, step) in seen:
                twice.add(step)
            seen.add((file.rank, step))
    steps = {step for _, step in seen} - twice
    for source in rest:
        steps = {step for step in steps if not source.first <= step <= source.last}
    return steps


def _first_steps(files: Sequence[EqualFile]) -> set[int]:
    """Return the steps at which a place, or a type of it, is seen first."""
    first: dict[tuple[int, Place, str], int] = {}
    for file in files:
        code = file.place * max(len(file.dtypes), 1) + file.dtype
        order = np.argsort(file.steps, kind="stable")
        kinds, at = np.unique(code[order], return_index=True)
        for kind, step in zip(kinds.tolist(), file.steps[order][at].tolist(), strict=True):
            place, dtype = divmod(kind, max(len(file.dtypes), 1))
            key = (file.rank, file.places[place], file.dtypes[dtype])
            first[key] = min(step, first.get(key, step))
    return set(first.values())


def _same_rows(a: Snapshot, b: Snapshot, first: BlockSource, second: BlockSource) -> bool:
    """Return whether two files hold the same rows in the same order; one that cannot be read holds no such rows."""
    if isinstance(first.name, str) and first.name == second.name and a.files.path() == b.files.path():
        return True
    try:
        x, y = (source.read((*_WORDS, *_PLAIN)) for source in (first, second))
        if len(x) != len(y) or not all(_same_words(x[name], y[name]) for name in _WORDS):
            return False
        if not all(_same_bits(numbers(x, name), numbers(y, name)) for name in _PLAIN):
            return False
        return all(_same_lists(*(source.read((name,))[name] for source in (first, second))) for name in _LISTS)
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException):
        return False  # what is wrong is found, and counted, where the rows are read


def _same_words(x: Any, y: Any) -> bool:
    first, second = encoded(x), encoded(y)
    if first.dictionary.equals(second.dictionary):
        return _same_bits(array_of(first.indices), array_of(second.indices))
    return bool(x.cast(pa.string()).equals(y.cast(pa.string())))


def _same_bits(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> bool:
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()


def _same_lists(x: Any, y: Any) -> bool:
    return bool(x.equals(y))  # of integers: there is no NaN among them


def _rows_in(source: BlockSource, partners: Mapping[Place, Place]) -> EqualFile | None:
    """Return the pairs that a file gives with its like: rows that were not recomputed, none twice."""
    try:
        table = source.read(_OF_ROWS)
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException):
        return None
    words, place = places_in(table, ("site", "port", "slot"))
    places = tuple(Place(site, port, slot) for site, port, slot in words)
    dtypes = encoded(table["dtype"])
    steps, call, dtype = numbers(table, "step"), numbers(table, "call"), array_of(dtypes.indices).astype(np.int64)
    keep = np.array([known in partners for known in places], bool)[place] & ~numbers(table, "recomputed").astype(bool)
    rows = np.flatnonzero(keep)
    calls = int(call.max(initial=0)) + 1
    at = np.searchsorted(np.unique(steps), steps)
    _, first = np.unique((at[rows] * len(places) + place[rows]) * calls + call[rows], return_index=True)
    if len(first) < len(rows):
        rows = rows[np.sort(first)]
    return EqualFile(source.rank, steps[rows], places, place[rows], tuple(dtypes.dictionary.to_pylist()), dtype[rows])
