"""Put the pieces of a tensor that ranks and microbatches hold in their places in the whole."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.record.step import Record

Shape = tuple[int, ...]
Ints = npt.NDArray[np.int64]
BatchOrder = Literal["rank, micro", "micro, rank", "rank strided, micro", "micro, rank strided"]
BATCH_ORDERS: Final[tuple[BatchOrder, ...]] = (
    "rank, micro",
    "micro, rank",
    "rank strided, micro",
    "micro, rank strided",
)
SequenceOrder = Literal["blocks", "head and tail", "every n-th"]
SEQUENCE_ORDERS: Final[tuple[SequenceOrder, ...]] = ("blocks", "head and tail", "every n-th")
_SHARD: Final = re.compile(r"(_?)S\((\d+)(?:, ?(\d+))?\)")
MICRO: Final = "micro"
COPY: Final = "R"
BATCH: Final = "batch"
SUM: Final = "P(sum)"


class Piece(NamedTuple):
    """One record, and where its rank and microbatch lie: a coordinate on each side of the mesh, and `micro`."""

    record: Record
    at: Mapping[str, int]


class Arrangement(NamedTuple):
    """How pieces make a whole: for each side `R` (copies), `S(1)` (along a dimension), `P(sum)` or `batch`."""

    placements: Mapping[str, str]
    sizes: Mapping[str, int]
    data: frozenset[str]
    order: BatchOrder = "rank, micro"
    found: frozenset[str] = frozenset()  # sides without a recorded placement
    sequence: SequenceOrder = "blocks"  # the tokens of a rank if a side without a recorded placement cuts them
    matrices: int = 1  # how many matrices lie side by side, each cut by itself, as those of queries, keys and values

    @property
    def copied(self) -> list[str]:
        """The sides along which ranks hold the same."""
        return [side for side, how in self.placements.items() if how == COPY]

    @property
    def may_hold_several(self) -> bool:
        """Whether ranks hold pieces without a recorded placement: there may be several matrices side by side."""
        return any(_SHARD.fullmatch(self.placements.get(side, "")) for side in self.found)

    @property
    def cut_behind_rows(self) -> list[str]:
        """The sides without a recorded placement along which ranks hold pieces of a later dimension than the first."""
        found = {side: _SHARD.fullmatch(self.placements.get(side, "")) for side in self.found}
        return [side for side, how in found.items() if how is not None and int(how[2]) > 0]

    @property
    def splits_batch(self) -> bool:
        """Whether ranks or microbatches have rows of their own, whose order must be known to put them together."""
        return any(how == BATCH and self.sizes.get(side, 1) > 1 for side, how in self.placements.items())

    @property
    def summed(self) -> list[str]:
        """The sides along which ranks hold partial sums."""
        return [side for side, how in self.placements.items() if how.startswith("P")]

    def copies(self, pieces: Sequence[Piece]) -> dict[tuple[int, ...], list[Piece]]:
        """Return the pieces of each copy of the whole."""
        found: dict[tuple[int, ...], list[Piece]] = {}
        for piece in pieces:
            found.setdefault(tuple(piece.at.get(side, 0) for side in self.copied), []).append(piece)
        return found

    def positions(self, piece: Piece, shape: Shape) -> Ints | None:
        """Return where each element of a piece lies in the flat whole; None when that is not known."""
        rows = self._rows(piece, shape)
        if rows is None:
            return None
        grid = np.ix_(*rows) if rows else ()
        strides = _strides(shape)
        return np.asarray(sum((g * s for g, s in zip(grid, strides, strict=True)), np.int64(0))).reshape(-1)

    def start(self, piece: Piece, shape: Shape) -> int | None:
        """Return where a piece begins whose elements follow each other in the flat whole; None where they do not."""
        rows = self._rows(piece, shape)
        if rows is None:
            return None
        if any(len(of) and of[-1] - of[0] != len(of) - 1 for of in rows):
            return None  # every n-th row
        cut = [i for i, of in enumerate(rows) if len(of) < shape[i]]
        if cut and any(len(of) > 1 for of in rows[: cut[-1]]):
            return None  # cut behind a dimension of several entries, as the columns of a matrix
        return int(sum(of[0] * stride for of, stride in zip(rows, _strides(shape), strict=True) if len(of)))

    def _rows(self, piece: Piece, shape: Shape) -> list[Ints] | None:
        """Return which entries of each dimension a piece has; None when that does not fit its shape."""
        rows: list[Ints] = [np.arange(n) for n in shape]
        for side, dimension in self._cuts():
            if dimension >= len(rows):
                return None
            matrices = np.split(rows[dimension], self._matrices(side, len(rows[dimension])))
            part = _PARTS[self.sequence if dimension and side in self.found else "blocks"]
            rows[dimension] = np.concatenate([part(of, self.sizes[side], piece.at.get(side, 0)) for of in matrices])
        if rows:
            rows[0] = self._rows_of_batch(rows[0], piece)
        return rows if tuple(map(len, rows)) == piece.record.summary.shape else None

    def _matrices(self, side: str, length: int) -> int:
        fits = side in self.found and length % (self.matrices * self.sizes[side]) == 0
        return self.matrices if fits else 1

    def _cuts(self) -> Iterator[tuple[str, int]]:
        """Yield sides with the dimension they cut, in the order of cutting: strided ones cut what others have cut."""
        found = [(side, _SHARD.fullmatch(how)) for side, how in self.placements.items()]
        for strided in (False, True):
            for side, how in found:
                if how is not None and bool(how[1]) == strided:
                    yield side, int(how[2])

    def _rows_of_batch(self, rows: Ints, piece: Piece) -> Ints:
        sides = [side for side, how in self.placements.items() if how == BATCH and side != MICRO]
        rank = 0
        for side in sides:
            rank = rank * self.sizes[side] + piece.at.get(side, 0)
        size = math.prod(self.sizes[side] for side in sides)
        for which in self.order.split(", "):
            if which == "micro":
                if self.placements.get(MICRO) == BATCH:
                    rows = _chunk(rows, self.sizes[MICRO], piece.at.get(MICRO, 0))
            elif which == "rank":
                rows = _chunk(rows, size, rank)
            else:
                rows = rows[rank::size]
        return rows


def _strides(shape: Shape) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _chunk(rows: Ints, parts: int, number: int) -> Ints:
    """Return one of so many parts, as torch.chunk and DTensor cut: all of one size but the last."""
    size = -(-len(rows) // parts)
    return rows[number * size : (number + 1) * size]


def _head_and_tail(rows: Ints, parts: int, number: int) -> Ints:
    """Return a part of the first half and its mirror image of the second, so that causal attention costs all alike."""
    return np.concatenate([_chunk(rows, 2 * parts, number), _chunk(rows, 2 * parts, 2 * parts - 1 - number)])


_PARTS: Final[Mapping[SequenceOrder, Callable[[Ints, int, int], Ints]]] = {
    "blocks": _chunk,
    "head and tail": _head_and_tail,
    "every n-th": lambda rows, parts, number: rows[number::parts],
}


def arrange(
    pieces: Sequence[Piece], known: Mapping[str, str], data: frozenset[str], shape: Shape | None, *, member: bool,
    summed: frozenset[str] = frozenset(),
) -> Arrangement:  # fmt: skip
    """Find how pieces make a whole of this shape: as was recorded, else as their sizes and equality say.

    `member` says that they are of a parameter, which data-parallel ranks share; a value is of each one's own batch.
    `summed` are sides along which pieces of the whole's own size are partial sums where they are not equal: the
    gradient of a value that has no rows, such as an embedding of positions, is a sum over the rows of all ranks.
    """
    sides = dict.fromkeys(side for piece in pieces for side in piece.at)
    sizes = {side: max(piece.at.get(side, 0) for piece in pieces) + 1 for side in sides}
    settled = {side: how for side, how in known.items() if sizes.get(side, 1) > 1}
    if sizes.get(MICRO, 1) > 1 and (shape is None or _is_cut(pieces, shape)):
        settled[MICRO] = BATCH
    open_sides = [side for side in sides if sizes[side] > 1 and side not in settled]
    choices: list[dict[str, str]] = [
        {**settled, **dict(zip(open_sides, chosen, strict=True))}
        for chosen in itertools.product((COPY, BATCH), repeat=len(open_sides))
    ]

    def badness(choice: dict[str, str]) -> tuple[bool, int, int]:
        copied = [side for side in open_sides if choice[side] == COPY]
        unlike = sum(not _alike_along(side, pieces) for side in copied)
        unusual = sum((choice[side] == BATCH) != (side in data and not member) for side in open_sides)
        wrong = shape is not None and _numel(pieces, choice) != math.prod(shape)
        return (wrong, unlike, unusual) if shape is None or not member else (wrong, unusual, unlike)

    best: dict[str, str] = min(choices, key=badness)
    if shape is not None:
        best = _with_dimensions(best, pieces, sizes, data, shape, set(open_sides))
    partial = [side for side in open_sides if best[side] == COPY and side in summed]
    if any(not _alike_along(side, pieces) for side in partial):
        best |= dict.fromkeys(partial, SUM)
    return Arrangement(best, sizes, data, found=frozenset(open_sides))


def cut_behind(pieces: Sequence[Piece], shape: Shape) -> bool:
    """Return whether pieces are cut along another dimension than the first."""
    return any(piece.record.summary.shape[1:] != shape[1:] for piece in pieces)


def fills(pieces: Sequence[Piece], sides: Sequence[str], shape: Shape) -> bool:
    """Return whether the pieces of the first rank along these sides have as many elements as the whole."""
    first = [piece for piece in pieces if not any(piece.at.get(side, 0) for side in sides)]
    return sum(piece.record.summary.numel for piece in first) == math.prod(shape)


def _is_cut(pieces: Sequence[Piece], shape: Shape) -> bool:
    return any(piece.record.summary.shape != shape for piece in pieces)


def _numel(pieces: Sequence[Piece], placements: Mapping[str, str]) -> int:
    once = [side for side, how in placements.items() if how == COPY or how.startswith("P")]
    return sum(piece.record.summary.numel for piece in pieces if not any(piece.at.get(side, 0) for side in once))


def _alike_along(side: str, pieces: Sequence[Piece]) -> bool:
    """Return whether ranks that differ in this coordinate alone recorded the same."""
    first: dict[Any, Any] = {}
    for piece in pieces:
        place = tuple((name, at) for name, at in piece.at.items() if name != side)
        if first.setdefault(place, fingerprint(piece.record)) != fingerprint(piece.record):
            return False
    return True


def fingerprint(record: Record) -> tuple[Any, ...]:
    """Return what is equal for equal tensors: the hash of their content where it was kept, else all statistics."""
    s = record.summary
    if s.hash is not None:
        return (s.shape, s.hash)
    numbers = (s.mean, s.std, s.min, s.max, s.l1, s.l2, s.zeros, s.nan)
    return (s.shape, *(None if isinstance(x, float) and math.isnan(x) else x for x in numbers))


def _with_dimensions(
    placements: Mapping[str, str], pieces: Sequence[Piece], sizes: Mapping[str, int], data: frozenset[str],
    shape: Shape, open_sides: set[str],
) -> dict[str, str]:  # fmt: skip
    """Find along which dimension each side without a known placement cuts: data along the first, else what fits."""
    local = pieces[0].record.summary.shape
    split = [side for side, how in placements.items() if how == BATCH and side in open_sides]
    if len(local) != len(shape) or not split or not shape:
        return dict(placements)
    fixed = [1] * len(shape)
    for side, how in placements.items():
        if found := _SHARD.fullmatch(how):
            fixed[int(found[2])] *= sizes[side]
        elif how == BATCH and side not in split:
            fixed[0] *= sizes[side]
    best: dict[str, str] | None = None
    for dims in itertools.product(range(len(shape)), repeat=len(split)):
        cuts = list(fixed)
        for side, dimension in zip(split, dims, strict=True):
            cuts[dimension] *= sizes[side]
        if all(-(-whole // cut) == part for whole, cut, part in zip(shape, cuts, local, strict=True)):
            placed = {
                side: BATCH if d == 0 and side in data else f"S({d})" for side, d in zip(split, dims, strict=True)
            }
            if best is None or sum(d == BATCH for d in placed.values()) > sum(d == BATCH for d in best.values()):
                best = {**placements, **placed}
    return dict(placements) if best is None else best


def whole_shape(pieces: Sequence[Piece], arrangement: Arrangement) -> Shape:
    """Return the shape of the whole, from that of the pieces."""
    shape = list(pieces[0].record.summary.shape)
    for side, how in arrangement.placements.items():
        found = _SHARD.fullmatch(how)
        dimension = int(found[2]) if found else 0 if how == BATCH else None
        if dimension is not None and dimension < len(shape):
            first = {piece.at.get(side, 0): piece for piece in reversed(pieces) if _first_on_others(piece, side)}
            if len(first) == arrangement.sizes[side]:
                sizes = [piece.record.summary.shape[dimension] for piece in first.values()]
                shape[dimension] = shape[dimension] * sum(sizes) // pieces[0].record.summary.shape[dimension]
    return tuple(shape)


def _first_on_others(piece: Piece, side: str) -> bool:
    return not any(at for name, at in piece.at.items() if name != side)
