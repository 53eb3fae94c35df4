"""Compare runs that are spread differently over ranks and microbatches, step by step, as one process would see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tensortap.diff.align import Alignment
from tensortap.diff.elements import CommonElements
from tensortap.diff.layouts import LayoutPairs, LayoutSide, PairedWhole, with_common_names
from tensortap.diff.metrics import elements, rms_of
from tensortap.diff.pair import Pair
from tensortap.diff.records import compare_records
from tensortap.diff.rounding import RoundingFloors
from tensortap.diff.tolerance import Precision, Tolerance
from tensortap.record.step import Record
from tensortap.select.ports import is_backward
from tensortap.types import Place

Names = Mapping[Place, Place]
_ADDS_UP: Final = 1e-2
_MERGED: Final = 2.0**-20  # moments are summed as float32 within a block


class LayoutComparison:
    """Compares the steps of two layouts, one after the other: what was rounded in one is carried into the next."""

    def __init__(self, a: LayoutSide, b: LayoutSide, aligned: Alignment, precision: Precision) -> None:
        self._pairs = LayoutPairs(a, b)
        self._to_a = {other: place for place, other in aligned.pairs.items()}
        self._precision = precision
        self._floors = RoundingFloors()

    @property
    def layouts(self) -> str:
        """How the ranks of both runs lie, and what was found of the batch, in words."""
        found = self._pairs
        factor = f"; gradients of values are {found.factor:g} times as large in b" if found.factor != 1 else ""
        return f"a {_mesh(found.a)}, b {_mesh(found.b)}, rows by {found.order}{factor}"

    def step(self, a: Sequence[Record], b: Sequence[Record], names_a: Names, names_b: Names) -> list[Pair]:
        """Return the pairs of one step, in the order in which its stages follow each other."""
        of_a = with_common_names(a, names_a)
        of_b = with_common_names(b, {own: self._to_a[name] for own, name in names_b.items() if name in self._to_a})
        self._precision.next_step()
        self._floors.next_step(of_a)
        found: list[Pair] = []
        group: list[tuple[PairedWhole, Pair]] = []
        for paired in self._pairs.step(of_a, of_b):
            if group and (group[0][0].place, group[0][0].call) != (paired.place, paired.call):
                found += self._explained(group)
                group = []
            group.append((paired, self._compare(paired)))
        return [*found, *self._explained(group)]

    def _compare(self, paired: PairedWhole) -> Pair:
        x, y = paired.summaries
        if paired.same_hash and x.dtype == y.dtype:
            y = replace(x, hist_offset=y.hist_offset, hist_counts=y.hist_counts)  # merging rounds, equal bits do not
        port = paired.place.port
        known = self._precision.tolerance(x.dtype, y.dtype, port)
        tolerance = self._floors.tolerance(paired.place, x, known)
        if not tolerance.rtol and len(paired.a.pieces) + len(paired.b.pieces) > 2:
            tolerance = Tolerance(_MERGED, tolerance.atol)  # moments of integers are exact but for their merging
        whole = common = self._pairs.elements(paired)
        if port == "update" and whole is not None:
            common = self._floors.above_noise(paired.place, whole)
        a, b = replace(paired.a.record, summary=x, call=paired.call), replace(paired.b.record, summary=y)
        pair = compare_records(a, b, tolerance, common, rank=paired.b.rank)
        pair = replace(pair, ratio=y.l2 / x.l2 if x.l2 else None)
        if pair.differs and whole is not None and is_backward(port):
            pair = self._without_turned(paired.place, pair, whole, tolerance, rms_of(x))
        self._floors.compared(paired.place, pair, x, whole)
        return pair

    def _without_turned(self, place: Place, pair: Pair, kept: CommonElements, tolerance: Tolerance, rms: float) -> Pair:
        """Return the pair without what turned decisions explain, as of a ReLU whose input is next to zero."""
        rest = self._floors.without_turned(place, kept, tolerance, rms)
        if rest is None:
            return pair
        count = kept.a.size - rest.a.size
        note = f"{count} of {kept.a.size} elements apart, as many as rounding turns decisions of a ReLU or the like"
        return replace(pair, excess=elements(rest.a, rest.b, tolerance, rms).excess, of="elements", note=note)

    def _explained(self, group: Sequence[tuple[PairedWhole, Pair]]) -> list[Pair]:
        """Return the pairs of one tensor's copies; where the copies add up to the reference, say so."""
        pairs = [pair for _, pair in group]
        if group and (missing := group[0][0].missing):
            note = f"there is none on rank {', '.join(map(str, missing))}"
            return [*pairs, replace(pairs[0], error=np.inf, excess=np.inf, rank=missing[0], of="record", note=note)]
        if len(pairs) < 2 or not all(pair.differs and not pair.note for pair in pairs):
            return pairs
        wanted, found = group[0][0].a.record.summary, [paired.summaries[1] for paired, _ in group]
        scale = rms_of(wanted)
        total = sum(summary.mean for summary in found)
        if abs(total - wanted.mean) > _ADDS_UP * scale or abs(found[0].mean - wanted.mean) < _ADDS_UP * scale:
            return pairs
        kept = [self._pairs.elements(paired) for paired, _ in group]
        if not _add_up(kept):
            return pairs
        note = f"the {len(pairs)} ranks' values add up to it: they are partial sums that were not reduced"
        return [replace(pair, note=note) for pair in pairs]


def _add_up(kept: Sequence[CommonElements | None]) -> bool:
    arrays = [common for common in kept if common is not None]
    if len(arrays) < len(kept):
        return True  # nothing but statistics: the means do
    total = sum(common.b.astype(np.float64) for common in arrays)
    wanted = arrays[0].a.astype(np.float64)
    return bool(np.linalg.norm(total - wanted) <= _ADDS_UP * np.linalg.norm(wanted))


def _mesh(side: LayoutSide) -> str:
    sides = [f"{name} {size}" for name, size in side.mesh.sides.items() if size > 1]
    return " × ".join(sides) if sides else "one process"
