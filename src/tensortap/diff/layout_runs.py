"""Compare runs that are spread differently over ranks and microbatches, step by step, as one process would see them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from tensortap.diff.align import Alignment
from tensortap.diff.delayed_updates import NOTE as DELAYED
from tensortap.diff.delayed_updates import joined_parts
from tensortap.diff.elements import CommonElements
from tensortap.diff.layouts import LayoutPairs, LayoutSide, PairedWhole, with_common_names
from tensortap.diff.metrics import elements, rms_of
from tensortap.diff.pair import Pair
from tensortap.diff.partial_sums import NOTE, Compared, add_up, settled
from tensortap.diff.records import compare_records
from tensortap.diff.rounding import RoundingFloors
from tensortap.diff.tolerance import Precision, Tolerance
from tensortap.record.step import Record
from tensortap.select.ports import MODULE_PORTS, is_backward
from tensortap.types import Place

Names = Mapping[Place, Place]
_MERGED: Final = 2.0**-20  # moments are summed as float32 within a block


class Copy(NamedTuple):
    """A tensor as one group of ranks holds it, compared with the reference, and the elements kept of both."""

    paired: PairedWhole
    pair: Pair
    whole: CommonElements | None


class LayoutComparison:
    """Compare the steps of two layouts, one after the other: rounding in one step affects the next."""

    def __init__(self, a: LayoutSide, b: LayoutSide, aligned: Alignment, precision: Precision) -> None:
        self._pairs = LayoutPairs(a, b)
        self._to_a = {other: place for place, other in aligned.pairs.items()}
        self._precision = precision
        self._floors = RoundingFloors()

    @property
    def layouts(self) -> str:
        """Describe the meshes of both runs, and the order of the batch."""
        found = self._pairs
        factor = f"; gradients of values are {found.factor:g} times as large in b" if found.factor != 1 else ""
        tokens = f", tokens by {found.sequence}" if found.sequence != "blocks" else ""
        sums = found.sums_without_elements
        left = f"; {sums} partial sums were not compared, which takes tt.full()" if sums else ""
        return f"a {_mesh(found.a)}, b {_mesh(found.b)}, rows by {found.order}{tokens}{factor}{left}"

    def step(self, a: Sequence[Record], b: Sequence[Record], names_a: Names, names_b: Names) -> list[Pair]:
        """Return the pairs of one step, in the order in which its stages follow each other."""
        of_a = with_common_names(a, names_a)
        of_b = with_common_names(b, {own: self._to_a[name] for own, name in names_b.items() if name in self._to_a})
        self._precision.next_step()
        self._floors.next_step(of_a)
        found: list[Compared] = []
        group: list[Copy] = []
        for paired in self._pairs.step(of_a, of_b):
            if group and (group[0].paired.place, group[0].paired.call) != (paired.place, paired.call):
                found += self._explained(group)
                group = []
            group.append(self._compare(paired))
        found += self._explained(group)
        return settled([self._derived(*one, of_a) for one in found])

    def _derived(self, paired: PairedWhole, pair: Pair, a: Mapping[Place, Sequence[Record]]) -> Compared:
        """Return a parameter that no optimizer holds, such as a moving average; it may differ as much as updates do."""
        place = paired.place
        if place.port != "param" or not pair.differs or any(place._replace(port=p) in a for p in ("grad", "update")):
            return paired, pair
        drifted = self._floors.drifted(pair.shape)
        return paired, self._compared(paired, self._pairs.elements(paired), drifted) if drifted else pair

    def _compare(self, paired: PairedWhole) -> Copy:
        whole = self._pairs.elements(paired)
        pair = self._compared(paired, whole)
        if pair.differs and whole is not None:
            for other in self._pairs.cut_otherwise(paired):
                elements_then = self._pairs.elements(other)
                then = self._compared(other, elements_then)
                if not then.differs:
                    pair, whole = then, elements_then
                    break
        return Copy(paired, pair, whole)

    def _compared(self, paired: PairedWhole, whole: CommonElements | None, drifted: float = 0.0) -> Pair:
        x, y = paired.summaries
        if paired.same_hash and x.dtype == y.dtype:
            y = replace(x, hist_offset=y.hist_offset, hist_counts=y.hist_counts)  # merging rounds, equal bits do not
        port = paired.place.port
        known = self._precision.tolerance(x.dtype, y.dtype, port)
        tolerance = self._floors.tolerance(paired.place, x, known._replace(atol=known.atol + drifted))
        if not tolerance.rtol and len(paired.a.pieces) + len(paired.b.pieces) > 2:
            tolerance = Tolerance(_MERGED, tolerance.atol)  # moments of integers are exact but for their merging
        common = whole
        if port == "update" and whole is not None:
            common = self._floors.above_noise(paired.place, whole)
        a, b = replace(paired.a.record, summary=x, call=paired.call), replace(paired.b.record, summary=y)
        pair = compare_records(a, b, tolerance, common, rank=paired.b.rank)
        if common is not whole:  # of the rest, which the statistics include, rounding decides
            pair = _by_elements(pair, common, tolerance, rms_of(x))
        if common is whole and pair.kept == "full" and pair.bit_equal == 1:
            pair = replace(pair, error=0.0, excess=0.0, tv=0.0)  # what is left is the rounding of merged statistics
        pair = replace(pair, ratio=y.l2 / x.l2 if x.l2 else None)
        if pair.differs and whole is not None and is_backward(port):
            pair = self._without_turned(paired.place, pair, whole, tolerance, rms_of(x))
        return pair

    def _without_turned(self, place: Place, pair: Pair, kept: CommonElements, tolerance: Tolerance, rms: float) -> Pair:
        """Return the pair without differences from changed decisions, such as those of a ReLU with an input
        near zero.
        """
        rest = self._floors.without_turned(place, kept, tolerance, rms)
        if rest is None:
            return pair
        count = kept.a.size - rest.a.size
        note = f"{count} of {kept.a.size} elements apart, as many as rounding turns decisions of a ReLU or the like"
        return replace(pair, excess=elements(rest.a, rest.b, tolerance, rms).excess, of="elements", note=note)

    def _explained(self, copies: Sequence[Copy]) -> list[Compared]:
        """Return the pairs of one tensor's copies; where they are its parts, say so.

        What copies differ by is noted for later values, and not what parts of a sum do.
        """
        group = [(copy.paired, copy.pair) for copy in copies]
        parts = self._of_parts(group, copies) if len(copies) > 1 and not copies[0].paired.missing else None
        if parts is not None:
            return parts
        for paired, pair, whole in copies:
            self._floors.compared(paired.place, pair, paired.summaries[0], whole)
        if not copies or not copies[0].paired.missing:
            return group
        first, pair, _ = copies[0]
        note = f"there is none on rank {', '.join(map(str, first.missing))}"
        absent = replace(pair, error=np.inf, excess=np.inf, rank=first.missing[0], of="record", note=note)
        return [*group, (first, absent)]

    def _of_parts(self, group: Sequence[Compared], copies: Sequence[Copy]) -> list[Compared] | None:
        """Return the pairs of copies that are parts of the whole: of an update, of a mean, of a sum; None otherwise."""
        first, pair = group[0]
        apart = [pair.differs and not pair.note for _, pair in group]
        wholes = [copy.whole for copy in copies]
        if first.place.port == "update" and any(apart) and self._have_parts_of_update(group, wholes):
            return [(paired, replace(pair, note=DELAYED) if pair.differs else pair) for paired, pair in group]
        if any(apart) and self._pairs.has_own_rows(first) and (first.a.record.summary.numel == 1 or all(apart)):
            return self._of_own_rows(group)
        # Of parts of a sum, some may be near the whole where tolerances are wide.
        if not (all(apart) or first.place.port in MODULE_PORTS) or not add_up(group, wholes):
            return None
        if first.place.port == "buffer":
            note = f"the {len(group)} ranks' values add up to it: each counts its own rows"
            return [(first, replace(pair, error=0.0, excess=0.0, note=note))]
        note = NOTE.format(len(group))
        return [(paired, replace(pair, note=note) if pair.differs else pair) for paired, pair in group]

    def _have_parts_of_update(self, group: Sequence[Compared], wholes: Sequence[CommonElements | None]) -> bool:
        """Return whether each rank has changed a part of a parameter, and all of them together what they should."""
        first, pair = group[0]
        whole = joined_parts(wholes)
        if whole is None:
            unchanged = [paired.summaries[1].l2 == 0 for paired, _ in group]
            return any(unchanged) and all(zero or not p.differs for zero, (_, p) in zip(unchanged, group, strict=True))
        clear = self._floors.above_noise(first.place, whole)
        x, tolerance = first.a.record.summary, Tolerance(pair.rtol, pair.atol)
        if clear is not None and elements(clear.a, clear.b, tolerance, rms_of(x)).excess > 1:
            return False
        self._floors.compared(first.place, replace(pair, error=0.0, excess=0.0), x, whole)
        return True

    def _of_own_rows(self, group: Sequence[Compared]) -> list[Compared]:
        """Return the pairs of a value that each rank makes of its own rows, such as the loss: their mean must agree.

        Where a number's does not, as of a loss over unequal numbers of tokens, nothing says what it should be.
        """
        first, pair = group[0]
        wanted, found = first.a.record.summary, [paired.summaries[1] for paired, _ in group]
        kept = [common for paired, _ in group if (common := self._pairs.elements(paired)) is not None]
        if len(kept) == len(group):
            values = np.mean([common.b.astype(np.float64) for common in kept], axis=0)
            apart = elements(kept[0].a, values, Tolerance(pair.rtol, pair.atol), rms_of(wanted))
            error, excess = apart.error, apart.excess
        else:
            error = abs(sum(summary.mean for summary in found) / len(found) - wanted.mean) / (rms_of(wanted) or 1.0)
            excess = error / (2 * pair.rtol) if pair.rtol else error and math.inf
        if excess <= 1:
            note = f"the mean of {len(group)} parts of the batch agrees"
            return [(first, replace(pair, error=error, excess=excess, note=note))]
        return list(group) if wanted.numel > 1 else []


def _by_elements(pair: Pair, kept: CommonElements | None, tolerance: Tolerance, rms: float) -> Pair:
    """Return the pair compared by some of its elements only."""
    if pair.of in ("shape", "nan", "inf"):
        return pair
    if kept is None:
        return replace(pair, error=0.0, excess=0.0, note="nothing of it is above rounding")
    found = elements(kept.a, kept.b, tolerance, rms)
    return replace(pair, error=found.error, excess=found.excess, of="elements")


def _mesh(side: LayoutSide) -> str:
    sides = [f"{name} {size}" for name, size in side.mesh.sides.items() if size > 1]
    return " × ".join(sides) if sides else "one process"
