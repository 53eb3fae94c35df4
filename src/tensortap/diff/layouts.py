"""Pair the records of runs that are spread differently over ranks and microbatches, whole tensor with whole tensor."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from tensortap.diff.elements import CommonElements, KeptElements
from tensortap.diff.pieces import (
    BATCH,
    BATCH_ORDERS,
    COPY,
    MICRO,
    SEQUENCE_ORDERS,
    Arrangement,
    BatchOrder,
    Piece,
    SequenceOrder,
    Shape,
    arrange,
    cut_behind,
    fills,
    fingerprint,
)
from tensortap.diff.pieces import whole_shape as shape_of_pieces
from tensortap.diff.whole import Whole, common_whole_elements, elements_of, merged_whole, scaled
from tensortap.distributed.mesh import Mesh, mesh_of
from tensortap.errors import RunError
from tensortap.record.step import Record
from tensortap.select.ports import MEMBER_PORTS, PORT_INFO, is_backward, module_of, stage_of
from tensortap.types import Place

Parts = Mapping[int, Mapping[str, Mapping[str, Any]]]
Records = Mapping[Place, Sequence[Record]]  # of one step, by the name that a place has in every layout
_ROOT_INPUT: Final = Place("", "input", "", "")


class LayoutSide(NamedTuple):
    """One run: its mesh of ranks, the part of each tensor on each rank, and the elements it kept."""

    mesh: Mesh
    parts: Parts
    kept: KeptElements

    @staticmethod
    def of(ranks: Sequence[int], parts: Parts, kept: KeptElements, mesh: Mapping[str, int] | None) -> LayoutSide:
        """Read the mesh from what ranks recorded, or take the one given."""
        return LayoutSide(mesh_of(ranks, parts, mesh), parts, kept)

    def pieces(self, records: Sequence[Record], micro: int) -> dict[int, list[Piece]]:
        """Return one call's pieces for each time a module is called in a microbatch."""
        calls = max(record.call for record in records) + 1
        reuse = max(1, calls // micro) if calls % micro == 0 else 1
        raw = [(record, self.mesh.coordinates(record.rank), record.call // reuse) for record in records]
        sides = {side: sorted({at[side] for _, at, _ in raw}) for side in self.mesh.sides}
        found: dict[int, list[Piece]] = {}
        for record, at, number in raw:
            place = {side: known.index(at[side]) for side, known in sides.items() if len(known) > 1}
            found.setdefault(record.call % reuse, []).append(Piece(record, {**place, MICRO: number}))
        return found

    def known(self, record: Record) -> dict[str, str]:
        """Return what was recorded of the placement, for the sides of the mesh."""
        shard = self.parts.get(record.rank, {}).get(str(record.place._replace(op="")), {})
        placed = dict(zip(shard.get("mesh", ()), shard.get("placements", ()), strict=False))
        return {side: how for side, how in placed.items() if side in self.mesh.sides}


class PairedWhole(NamedTuple):
    """A whole tensor of the reference with one of the other run, whose values are `factor` times as large."""

    place: Place
    call: int
    a: Whole
    b: Whole
    factor: float
    missing: tuple[int, ...] = ()  # ranks of `b` that should have recorded it and did not

    @property
    def summaries(self) -> tuple[Any, Any]:
        """The statistics of both, in one scale."""
        y = self.b.record.summary
        return self.a.record.summary, y if self.factor == 1.0 else scaled(y, self.factor)

    @property
    def same_hash(self) -> bool:
        """Whether the content hashes of both wholes are known and equal."""
        x, y = self.summaries
        return x.hash is not None and x.hash == y.hash


class LayoutPairs:
    """Pairs whole tensors, step by step. What holds for the run, the batch's order and scales, is found once."""

    def __init__(self, a: LayoutSide, b: LayoutSide) -> None:
        self.a, self.b = a, b
        self.order: BatchOrder = "rank, micro"
        self.order_known = False
        self.sequence: SequenceOrder = "blocks"
        self.factor = 1.0
        self.clipped = 1.0  # by how much gradients of parameters are smaller where one run's are clipped already
        self.sums_without_elements = 0
        self._split: frozenset[str] = frozenset()  # sides of `b` along which ranks and microbatches have their own rows
        self._ready = False

    def step(self, a: Records, b: Records) -> Iterator[PairedWhole]:
        """Yield the pairs of one step: parameters, values in order of execution, gradients, updates."""
        micro = _micro(a), _micro(b)
        ordered = sorted(a, key=lambda place: (stage_of(place.port), min(record.seq for record in a[place])))
        if not self._ready:
            self._prepare([place for place in ordered if place in b], a, b, micro)
        self.clipped = self._clip_factor(a, b, micro)
        pairs = [
            pair
            for place in ordered
            if place in b
            for pair in self._pairs(place, a[place], b[place], micro, self._absent(place, b))
        ]
        # Of a module that is called several times, each call has its own place in the order.
        yield from sorted(pairs, key=lambda pair: (stage_of(pair.place.port), pair.a.record.seq))

    def _pairs(
        self, place: Place, a: Sequence[Record], b: Sequence[Record], micro: tuple[int, int], missing: tuple[int, ...]
    ) -> Iterator[PairedWhole]:
        of_a, of_b = self.a.pieces(a, micro[0]), self.b.pieces(b, micro[1])
        factor = self.factor if is_backward(place.port) else self.clipped if place.port == "grad" else 1.0
        for call in of_a.keys() & of_b.keys():
            first = self._reference(place, of_a[call])
            if first is None:
                continue
            for copy in self._copies(place, of_b[call], first.record.summary.shape):
                yield PairedWhole(place, call, first, copy, factor, missing)

    def _reference(self, place: Place, pieces: Sequence[Piece]) -> Whole | None:
        arrangement = self._arranged(self.a, place, pieces, None)
        shape = shape_of_pieces(pieces, arrangement)
        copies = arrangement.copies(pieces)
        whole = merged_whole(copies[min(copies)], arrangement, shape, self.a.kept)
        guessed = arrangement.splits_batch and not self.order_known
        return whole.without_hash() if whole is not None and guessed else whole

    def _copies(self, place: Place, pieces: Sequence[Piece], shape: Shape) -> Iterator[Whole]:
        """Yield the whole as each group of ranks holds it: once where all hold the same."""
        arrangement = self._arranged(self.b, place, pieces, shape)._replace(order=self.order)
        if place.port not in MEMBER_PORTS and arrangement.cut_behind_rows:
            arrangement = arrangement._replace(sequence=self.sequence)
        self._require_mesh(place, pieces, shape, arrangement)
        copies = arrangement.copies(pieces)
        seen: set[Any] = set()
        for _, own in sorted(copies.items()):
            marks = tuple(sorted((tuple(sorted(p.at.items() - _at(p, arrangement.copied))), fingerprint(p.record))
                                 for p in own))  # fmt: skip
            if marks in seen and math.prod(shape) > 1 and place.port != "buffer":  # equal counts add up too
                continue
            seen.add(marks)
            whole = merged_whole(own, arrangement, shape, self.b.kept)
            if whole is not None and arrangement.splits_batch and not self.order_known:
                whole = whole.without_hash()
            if whole is None:
                self.sums_without_elements += 1
            else:
                yield whole

    def _arranged(self, side: LayoutSide, place: Place, pieces: Sequence[Piece], shape: Shape | None) -> Arrangement:
        known = side.known(pieces[0].record)
        summed = self._split if is_backward(place.port) else frozenset()
        data, member = side.mesh.data, place.port in MEMBER_PORTS
        if shape and data and (place.site, place.port) == ("", "input"):
            # Ranks that lie along any other side read the same rows, unless its name says that they do not, or those
            # rows are too few: experts may be spread over ranks that each have rows of their own.
            others = [name for name in side.mesh.sides if name not in data and not name.startswith(("dp", "data"))]
            if all(name.startswith(_SAME_ROWS) for name in others) or fills(pieces, others, shape):
                known |= dict.fromkeys(others if not cut_behind(pieces, shape) else (), COPY)
        return arrange(pieces, known, data, shape, member=member, summed=summed)

    def _require_mesh(self, place: Place, pieces: Sequence[Piece], shape: Shape, arrangement: Arrangement) -> None:
        """Raise if ranks without a known placement hold a parameter in a way that one side cannot explain."""
        ranks = arrangement.sizes.get("rank", 1)
        total = sum(piece.record.summary.numel for piece in pieces)
        if place.port != "param" or ranks < 4 or not math.prod(shape) < total < ranks * math.prod(shape):
            return
        raise RunError(
            f"the {ranks} ranks' parts of {place.site} are {total} elements for {math.prod(shape)}: some hold copies "
            f"and some pieces, and nothing recorded tells which. Say how the ranks lie, the side with adjacent ranks "
            f"last: mesh={{'dp': {ranks // 2}, 'tp': 2}}"
        )

    def _absent(self, place: Place, b: Records) -> tuple[int, ...]:
        """Return the ranks that have a parameter but not its gradient or update."""
        if place.port not in ("grad", "update"):
            return ()
        having = {record.rank for record in b.get(place._replace(port="param"), ())}
        return tuple(sorted(having - {record.rank for record in b[place]}))

    def _prepare(self, places: Sequence[Place], a: Records, b: Records, micro: tuple[int, int]) -> None:
        self._ready = True
        forward = [p for p in places if PORT_INFO[p.port].when == "forward"]
        forward = [_ROOT_INPUT] * (_ROOT_INPUT in forward) + forward
        self._split = self._sides_of_batch(forward, a, b, micro)
        ranks = self._split - {MICRO}
        self.b = self.b._replace(mesh=self.b.mesh._replace(data=self.b.mesh.data | ranks))
        self._split |= self._sides_of_tokens(a, b, micro)
        self._find_order(forward, a, b, micro)
        backward = [p for p in places if is_backward(p.port)]
        right = self._modules_with_right_gradients(places, a, b, micro)
        for place in sorted(backward, key=lambda p: p.site not in right)[:1]:
            self._find_factor(place, a, b, micro)

    def _find_order(self, places: Iterable[Place], a: Records, b: Records, micro: tuple[int, int]) -> None:
        """Find in which order ranks and microbatches took the rows of the batch and its tokens: it gives the reference.

        The first tensor kept in both tells, or a hash that is equal; where neither does, the order is not known.
        """
        self.order_known = True  # while it is tried
        for place in places:
            tried: list[tuple[float, BatchOrder, SequenceOrder]] = []
            first = next(self._pairs(place, a[place], b[place], micro, ()), None)
            cut = first is not None and bool(first.b.arrangement.cut_behind_rows)
            for self.order, self.sequence in itertools.product(BATCH_ORDERS, SEQUENCE_ORDERS if cut else ("blocks",)):
                pairs = list(self._pairs(place, a[place], b[place], micro, ()))
                if pairs and all(pair.same_hash for pair in pairs):
                    return
                unlike = [_unlike(self.elements(pair)) for pair in pairs]
                if pairs and all(part is not None for part in unlike):
                    tried.append((sum(part or 0.0 for part in unlike), self.order, self.sequence))
            if tried:
                _, self.order, self.sequence = min(tried, key=lambda one: one[0])
                return
        self.order, self.sequence, self.order_known = BATCH_ORDERS[0], SEQUENCE_ORDERS[0], False

    def _sides_of_batch(
        self, places: Sequence[Place], a: Records, b: Records, micro: tuple[int, int]
    ) -> frozenset[str]:
        """Return the sides along which the first value that is cut by rows is, which is the model's input if any."""
        for place in places:
            for pair in self._pairs(place, a[place], b[place], micro, ()):
                placed = pair.b.arrangement.placements
                split = frozenset(side for side, how in placed.items() if how in (BATCH, "S(0)"))
                if split:
                    return split
        return frozenset()

    def _sides_of_tokens(self, a: Records, b: Records, micro: tuple[int, int]) -> frozenset[str]:
        """Return the sides along which the model's input is cut behind its rows: ranks have tokens of their own."""
        inputs = [place for place in a if (place.site, place.port) == ("", "input") and place in b]
        pairs = (pair for place in inputs for pair in self._pairs(place, a[place], b[place], micro, ()))
        return frozenset(side for pair in pairs for side in pair.b.arrangement.cut_behind_rows)

    def _modules_with_right_gradients(
        self, places: Sequence[Place], a: Records, b: Records, micro: tuple[int, int]
    ) -> set[str]:
        """Return the modules with a parameter whose gradient is as large as the reference's.

        They tell the factor of gradients of values: one of several losses may have another, and be the fault.
        """
        found = set()
        for place in (p for p in places if p.port == "grad"):
            for pair in itertools.islice(self._pairs(place, a[place], b[place], micro, ()), 1):
                x, y = (of.record.summary.l2 for of in (pair.a, pair.b))
                if x and abs(y / x - 1) < _NEAR:
                    found.add(module_of(place.site, place.port))
        return found

    def _find_factor(self, place: Place, a: Records, b: Records, micro: tuple[int, int]) -> None:
        """Find the whole number by which gradients of values are larger: each rank averages over its own rows only."""
        pairs = list(self._pairs(place, a[place], b[place], micro, ()))
        if not pairs:
            return
        x, y = pairs[0].a.record.summary, pairs[0].b.record.summary
        if not x.l2 or not y.l2:
            return
        ranks = [math.prod(side.mesh.sides[name] for name in side.mesh.data) for side in (self.a, self.b)]
        tokens = math.prod(self.b.mesh.sides[name] for name in self._split - self.b.mesh.data - {MICRO})
        able = {
            (ranks[1] ** i * micro[1] ** j * tokens**n) / (ranks[0] ** k * micro[0] ** m)
            for i in (0, 1) for j in (0, 1) for k in (0, 1) for m in (0, 1) for n in (0, 1)
        }  # fmt: skip
        ratio = y.l2 / x.l2
        fitting = [c for c in able | {1 / c for c in able} if abs(ratio / c - 1) < _NEAR]
        self.factor = min(fitting, key=lambda c: abs(ratio / c - 1), default=1.0)

    def _clip_factor(self, a: Records, b: Records, micro: tuple[int, int]) -> float:
        """Return the one factor between gradients that were recorded before clipping in one run and after in the other.

        `clip_grad_norm_` is seen, and its gradients are recorded before it; what a loop does by hand is not. Whether
        they were clipped by the right norm then shows in the updates.
        """
        self.clipped = 1.0
        places = [place for place in a if place.port == "grad" and place in b]
        seen = [any("clip" in record.numbers for place in places for record in of[place]) for of in (a, b)]
        if seen[0] == seen[1]:
            return 1.0
        pairs = [pair for place in places for pair in self._pairs(place, a[place], b[place], micro, ())]
        norms = [(pair.a.record.summary.l2, pair.b.record.summary.l2) for pair in pairs]
        return float(np.median([y / x for x, y in norms if x and y] or [1.0])) or 1.0

    def cut_otherwise(self, pair: PairedWhole) -> Iterator[PairedWhole]:
        """Yield the pair as it is when ranks hold their parts in another way, such as those of matrices side by side.

        So it is with queries, keys and values in one layer, and with a gate beside its values. Where ranks have tokens
        from both ends of the sequence, they may still have heads or features in blocks.
        """
        if is_backward(pair.place.port) and pair.factor != 1 and pair.a.record.summary.numel == 1:
            yield pair._replace(factor=1.0)  # of a mean over a rank's own rows, such as a second loss, it is the same
        if pair.b.arrangement.sequence != "blocks":
            yield pair._replace(b=pair.b._replace(arrangement=pair.b.arrangement._replace(sequence="blocks")))
        if pair.b.arrangement.may_hold_several:
            for count in _SIDE_BY_SIDE:
                yield pair._replace(b=pair.b._replace(arrangement=pair.b.arrangement._replace(matrices=count)))

    def has_own_rows(self, pair: PairedWhole) -> bool:
        """Return whether copies of a forward value are made of different rows of the batch."""
        if pair.place.port in MEMBER_PORTS or is_backward(pair.place.port):
            return False
        return bool(self._split.intersection(pair.b.arrangement.copied))

    def elements(self, pair: PairedWhole) -> CommonElements | None:
        """Return the elements that both runs kept of a whole, in one order."""
        shape = pair.a.record.summary.shape
        x = elements_of(pair.a.pieces, pair.a.arrangement, shape, self.a.kept)
        y = elements_of(pair.b.pieces, pair.b.arrangement, shape, self.b.kept)
        return common_whole_elements(x, y, pair.factor)


_NEAR: Final = 0.05
_SAME_ROWS: Final = ("tp", "tensor", "pp", "pipe", "stage")  # names of sides whose ranks have parts of one model
_SIDE_BY_SIDE: Final = (2, 3)


def _at(piece: Piece, sides: Sequence[str]) -> set[tuple[str, int]]:
    return {(side, piece.at[side]) for side in sides if side in piece.at}


def _micro(records: Records) -> int:
    """Return how many microbatches a step has: as often as most modules are called."""
    calls = Counter(
        max(record.call for record in of) + 1
        for place, of in records.items()
        if PORT_INFO[place.port].when == "forward"
    )
    root = records.get(_ROOT_INPUT)
    if root:
        return max(record.call for record in root) + 1
    return calls.most_common(1)[0][0] if calls else 1


def _unlike(common: CommonElements | None) -> float | None:
    """Return how far two sets of elements differ; None where nothing was kept of both."""
    if common is None:
        return None
    x, y = common.a.astype(np.float64), common.b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    return float(np.abs(x - y)[finite].sum())


def with_common_names(records: Iterable[Record], names: Mapping[Place, Place]) -> dict[Place, list[Record]]:
    """Group the records of a step by the name that their place has in every layout."""
    found: dict[Place, list[Record]] = {}
    for record in records:
        common = names.get(record.place._replace(op=""))
        if common is not None and not record.recomputed:
            found.setdefault(common, []).append(replace(record, place=record.place._replace(op="")))
    return found
