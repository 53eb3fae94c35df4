"""Compare two runs of one layout by columns: all pairs as arrays, and as records only those that are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tensortap.diff.cause import Cause, first_cause
from tensortap.diff.columns import COLUMNS, Bools, ChunkDifference, Floats, RoundingSoFar, differences
from tensortap.diff.elements import KeptElements
from tensortap.diff.pair import Pair
from tensortap.diff.pair_reader import ListReader, PairReader, PairRows, no_rows, rows_of
from tensortap.diff.result import PairExcess, SiteDiff
from tensortap.diff.row_pairs import RowPairs, RunPair
from tensortap.diff.tolerance import Precision
from tensortap.store.arrays import Ints

_LATEST: Final = 1 << 62
HISTOGRAM_ROWS: Final = 1 << 18  # rows above which histograms of the first pairs only are compared


class ColumnarResult(NamedTuple):
    """The result of a comparison by columns; sites in the order in which they are first seen."""

    sites: list[SiteDiff]
    first: Pair | None
    first_unequal: Pair | None
    cause: Cause | None
    alone: tuple[int, int]
    excess: PairExcess


class ColumnarComparison:
    """Compare all pairs of two runs, a chunk of rows at a time."""

    def __init__(
        self, runs: RunPair, kept: tuple[KeptElements, KeptElements], precision: Precision, *, bitwise: bool
    ) -> None:
        self._runs = runs
        self._kept = kept
        self._bitwise = bitwise
        self._records = PairReader(runs, kept, bitwise=bitwise)
        self._lists = ListReader(runs)
        self._rounding = RoundingSoFar(precision, [place.port == "param" for place, _ in runs.places])
        self._sites = SiteTotals(len(runs.places))
        self._unequal = EarliestRow()
        self._first_step = no_rows(0)  # the pairs of the first step at which something differs, of the first rank
        self._alone = [0, 0]
        self._excess: list[tuple[Ints, Ints, Floats]] = []

    def result(self, progress: Callable[[int, int], None]) -> ColumnarResult:
        """Go through all pairs."""
        ranks, steps = self._runs.ranks, len(self._runs.both)
        if len(ranks) > 1:
            self._find_first_rounding(ranks)
        for n, rank in enumerate(ranks):
            for pairs in self._runs.chunks(rank, COLUMNS):
                self._alone = [self._alone[0] + pairs.alone_a, self._alone[1] + pairs.alone_b]
                if len(pairs):
                    self._add(pairs)
                    progress(n * steps + int(pairs.a.index.max()), len(ranks) * steps)
        return self._collected()

    def _find_first_rounding(self, ranks: Sequence[int]) -> None:
        """Find where each tolerance is seen first: what one rank rounds counts for later pairs of the others."""
        for rank in ranks:
            for pairs in self._runs.chunks(rank, ("dtype",)):
                self._rounding.add(pairs)

    def _add(self, pairs: RowPairs) -> None:
        self._rounding.add(pairs)
        rtol = self._rounding.rtol(pairs)
        found = differences(pairs, rtol, self._rounding.atol)
        if self._bitwise:
            self._to_the_last_bit(pairs, found)
        known = self._compare_elements(pairs, rtol, found)
        if not self._bitwise:
            self._find_unequal_histograms(pairs, found, known)
        self._sites.add(pairs, rtol, found.excess)
        self._unequal.add(pairs, rtol, found.unequal)
        if not len(self._first_step) and (differs := found.excess > 1).any():
            index = pairs.a.index
            self._first_step = rows_of(pairs, rtol, np.flatnonzero(index == index[differs].min()))
        self._excess.append((pairs.a.site.astype(np.int32), pairs.a.index.astype(np.int32), found.excess))

    def _compare_elements(self, pairs: RowPairs, rtol: Floats, found: ChunkDifference) -> Bools:
        """Compare the pairs with elements kept in both runs, one by one; return which those are."""
        known = np.zeros(len(pairs), bool)
        if at := self._records.with_elements(pairs):
            known[at] = True
            for i, pair in zip(at, self._made(rows_of(pairs, rtol, at)), strict=True):
                found.error[i], found.excess[i], found.unequal[i] = pair.error, pair.excess, pair.unequal
        return known

    def _find_unequal_histograms(self, pairs: RowPairs, found: ChunkDifference, known: Bools) -> None:
        """Compare histograms where nothing else differs: of the pairs before the first that is known to be unequal."""
        position = pairs.position
        until = min(self._unequal.position, int(position[found.unequal].min(initial=_LATEST)))
        at = np.flatnonzero(~found.unequal & ~known & (position < until) & ~self._lists.same_rows(pairs))
        if len(at):
            found.unequal[at] = self._lists.histograms_differ(pairs, at)

    def _to_the_last_bit(self, pairs: RowPairs, found: ChunkDifference) -> None:
        """Make every unequal pair differ beyond all tolerances, as `records.to_the_last_bit` does for one pair."""
        a, b = pairs.a.columns, pairs.b.columns
        hashed = a["hashed"] & b["hashed"]
        other = np.where(hashed, a["hash"] != b["hash"], found.error != 0)
        other |= (a["dtype"] != b["dtype"]) | (a["numel"] != b["numel"])
        at = np.flatnonzero(~other & ~self._lists.same_rows(pairs))
        if len(at):
            other[at] = self._lists.shapes_differ(pairs, at)
        at = np.flatnonzero(~other & ~hashed & ~self._lists.same_rows(pairs))
        if len(at):
            other[at] = self._lists.histograms_differ(pairs, at)
        found.excess[:] = np.where(other, np.inf, 0.0)
        found.error[~other] = 0.0
        found.unequal[:] = other

    def _collected(self) -> ColumnarResult:
        totals, order = self._sites, self._sites.order()
        differing = order[totals.differing[order] > 0]
        first = totals.first[differing]
        first = first[np.lexsort((first["rank"], first["position"]))[:1]]
        shown = np.concatenate([first, self._unequal.rows])
        pairs = self._pairs_at(np.concatenate([totals.worst[order], totals.first[differing]]), shown)
        sites = [
            SiteDiff(
                worst=pairs[totals.worst[site].tobytes()],
                first=pairs[totals.first[site].tobytes()] if totals.differing[site] else None,
                pairs=int(totals.pairs[site]),
                differing=int(totals.differing[site]),
            )
            for site in order.tolist()
        ]
        return ColumnarResult(
            sites=sites,
            first=pairs[first[0].tobytes()] if len(first) else None,
            first_unequal=pairs[self._unequal.rows[0].tobytes()] if len(self._unequal.rows) else None,
            cause=first_cause(self._pairs_of_step(int(first[0]["position"]) >> 32, pairs)) if len(first) else None,
            alone=(self._alone[0], self._alone[1]),
            excess=self._excesses(),
        )

    def _made(self, rows: PairRows, *, histograms: bool = True) -> list[Pair]:
        return self._records.pairs(rows, self._rounding.atol, histograms=histograms)

    def _pairs_at(self, rows: PairRows, shown: PairRows) -> dict[bytes, Pair]:
        """Return the pairs of rows, each made once; of many files, with the histograms only of those that are shown."""
        rows = rows[list({row.tobytes(): i for i, row in enumerate(rows)}.values())]
        every = self._bitwise or self._records.rows_in_files(rows) <= HISTOGRAM_ROWS
        found = self._by_row(rows, histograms=every)
        rest = shown if not every else shown[[row.tobytes() not in found for row in shown]]
        return found | self._by_row(rest, histograms=True)

    def _by_row(self, rows: PairRows, *, histograms: bool) -> dict[bytes, Pair]:
        return dict(zip((row.tobytes() for row in rows), self._made(rows, histograms=histograms), strict=True))

    def _pairs_of_step(self, index: int, known: Mapping[bytes, Pair]) -> Sequence[Pair]:
        """Return all pairs of the first step at which something differs, in order of execution."""
        if len(self._runs.ranks) > 1:
            return self._pairs_of_ranks(index)
        rows = self._first_step[np.argsort(self._first_step["position"], kind="stable")]
        keys = [row.tobytes() for row in rows]
        new = rows[[key not in known for key in keys]]
        made = {**known, **self._by_row(new, histograms=self._bitwise)}
        return [made[key] for key in keys]

    def _pairs_of_ranks(self, index: int) -> Sequence[Pair]:
        """Return all pairs of one step, which are read again, since ranks were compared one by one."""
        step = RunPair(*self._runs.snapshots, [self._runs.both[index]], dict(self._runs.places))
        found = [rows_of(pairs, self._rounding.rtol(pairs, shift=index))
                 for rank in step.ranks for pairs in step.chunks(rank, COLUMNS) if len(pairs)]  # fmt: skip
        rows = np.concatenate(found)
        rows = rows[np.lexsort((rows["rank"], rows["position"]))]
        reader = PairReader(step, self._kept, bitwise=self._bitwise)
        return reader.pairs(rows, self._rounding.atol, histograms=self._bitwise)

    def _excesses(self) -> PairExcess:
        names = tuple(str(place) for place, _ in self._runs.places)
        steps = np.array([at.step for at, _ in self._runs.both], np.int64)
        columns = [np.concatenate(parts) for parts in zip(*self._excess, strict=True)] or [np.zeros(0, np.int64)] * 3
        return PairExcess(names, columns[0], steps[columns[1]], columns[2])


class SiteTotals:
    """By site: how many pairs there are and how many differ, the worst, and the first beyond the tolerance."""

    def __init__(self, sites: int) -> None:
        self.pairs = np.zeros(sites, np.int64)
        self.differing = np.zeros(sites, np.int64)
        self.worst = no_rows(sites)
        self.first = no_rows(sites)
        self._excess = np.full(sites, -1.0)
        self._worst_at, self._first_at, self._seen_at = (np.full(sites, _LATEST) for _ in range(3))

    def order(self) -> Ints:
        """Return the sites that have pairs, in the order in which they are first seen."""
        sites = np.flatnonzero(self.pairs)
        return sites[np.argsort(self._seen_at[sites], kind="stable")]

    def add(self, pairs: RowPairs, rtol: Floats, excess: Floats) -> None:
        """Add pairs."""
        site, position, excess = pairs.a.site, pairs.position, np.fmax(excess, 0.0)  # 0 for NaN
        differs = excess > 1
        self.pairs += np.bincount(site, minlength=len(self.pairs))
        self.differing += np.bincount(site[differs], minlength=len(self.pairs))
        np.minimum.at(self._seen_at, site, position)
        top = np.full(len(self.pairs), -1.0)
        np.maximum.at(top, site, excess)
        known, at_top = self._excess[site], excess == top[site]
        worse = at_top & ((excess > known) | ((excess == known) & (position < self._worst_at[site])))
        chosen = _earliest(site, position, np.flatnonzero(worse))
        self.worst[site[chosen]] = rows_of(pairs, rtol, chosen)
        self._worst_at[site[chosen]], self._excess[site[chosen]] = position[chosen], excess[chosen]
        chosen = _earliest(site, position, np.flatnonzero(differs & (position < self._first_at[site])))
        self.first[site[chosen]] = rows_of(pairs, rtol, chosen)
        self._first_at[site[chosen]] = position[chosen]


class EarliestRow:
    """The first pair in order of execution among those added; at the same position, that of the lowest rank."""

    def __init__(self) -> None:
        self.rows = no_rows(0)

    @property
    def position(self) -> int:
        """Its position in the order of execution; a very large number before any row was added."""
        return int(self.rows["position"][0]) if len(self.rows) else _LATEST

    def add(self, pairs: RowPairs, rtol: Floats, chosen: Bools) -> None:
        """Add the chosen of some pairs of one rank; ranks come in order."""
        at = np.flatnonzero(chosen)
        if len(at):
            first = at[[np.argmin(pairs.position[at])]]
            if pairs.position[first[0]] < self.position:
                self.rows = rows_of(pairs, rtol, first)


def _earliest(site: Ints, position: Ints, candidates: Ints) -> Ints:
    """Return the candidate of each site that comes first in order of execution."""
    sites, at = site[candidates], position[candidates]
    order = np.lexsort((at, sites))
    first: Bools = np.diff(sites[order], prepend=-1) != 0
    return candidates[order[first]]
