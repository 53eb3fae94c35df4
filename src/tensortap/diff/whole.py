"""Merge the pieces of a tensor into one record: statistics exactly, kept elements in their places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.diff.elements import Array, CommonElements, KeptElements, Positions, call_of
from tensortap.diff.pieces import Arrangement, Piece, Shape
from tensortap.record.step import Record
from tensortap.reduce.content_hash import combine
from tensortap.reduce.merge import merge_groups, merge_histograms
from tensortap.reduce.statistics import NUMBERS, SCALED
from tensortap.reduce.summary import Summary, summarize
from tensortap.types import DTYPES

_ITEM_SIZES: Final = {dtype.name: dtype.itemsize for dtype in DTYPES}


class Whole(NamedTuple):
    """A tensor as one process would have it: its merged record, and the pieces it was merged from."""

    record: Record
    pieces: tuple[Piece, ...]
    arrangement: Arrangement

    @property
    def rank(self) -> int:
        """The first rank that holds a piece."""
        return min(piece.record.rank for piece in self.pieces)

    def without_hash(self) -> Whole:
        """Return it without the hash of the whole: the order of its pieces is a guess."""
        return self._replace(record=replace(self.record, summary=replace(self.record.summary, hash=None)))


class WholeElements(NamedTuple):
    """Elements that were kept of a whole, and where they lie in it."""

    kind: str
    values: Array
    at: Positions


def merged_whole(pieces: Sequence[Piece], arrangement: Arrangement, shape: Shape, kept: KeptElements) -> Whole | None:
    """Return the whole; None for partial sums without kept elements, since their statistics do not add up."""
    first = min((piece.record for piece in pieces), key=lambda record: record.seq)
    if arrangement.summed:
        found = elements_of(pieces, arrangement, shape, kept)
        if found is None or found.kind != "full":
            return None
        whole = np.zeros(int(np.prod(shape)), np.float64)
        whole[found.at] = found.values
        summary = replace(summarize(whole.reshape(shape)), dtype=first.summary.dtype)
    elif len(pieces) == 1 and pieces[0].record.summary.shape == shape:
        summary = first.summary
    else:
        summary = merge_summaries([piece.record.summary for piece in pieces], shape)
        summary = replace(summary, hash=combined_hash(pieces, arrangement, shape))
    return Whole(replace(first, summary=summary), tuple(pieces), arrangement)


def combined_hash(pieces: Sequence[Piece], arrangement: Arrangement, shape: Shape) -> int | None:
    """Return the hash of the whole from those of pieces that follow each other in it; None where they do not.

    Pieces along the first dimension do, and along a later one behind dimensions of one entry. Columns of a matrix,
    every n-th row of a batch, partial sums and pieces of other types have no such order.
    """
    starts = [arrangement.start(piece, shape) for piece in pieces]
    summaries = [piece.record.summary for piece in pieces]
    if None in starts or len({s.dtype for s in summaries}) > 1 or sum(s.numel for s in summaries) != math.prod(shape):
        return None
    whole: int | None = None
    for _, summary in sorted(zip(starts, summaries, strict=True), key=lambda pair: (pair[0] or 0, -pair[1].numel)):
        if summary.hash is None:
            return None
        size = summary.numel * _ITEM_SIZES[summary.dtype]
        whole = summary.hash if whole is None else combine(whole, summary.hash, size)
    return whole


def merge_summaries(summaries: Sequence[Summary], shape: Shape) -> Summary:
    """Return the statistics of a tensor from those of its pieces, as if its elements had been seen together."""
    columns = {name: np.array([s[name] for s in summaries]) for name in NUMBERS}
    merged = merge_groups(columns, np.zeros(1, np.int64))
    numbers: dict[str, Any] = {name: merged[name][0].item() for name in NUMBERS}
    return Summary(dtype=summaries[0].dtype, shape=shape, **numbers, **_histogram(summaries))


def _histogram(summaries: Sequence[Summary]) -> dict[str, Any]:
    counts = [s.hist_counts for s in summaries if s.hist_counts is not None]
    if len(counts) < len(summaries):
        return {}
    ends = np.concatenate([[0], np.cumsum([len(c) for c in counts])]).astype(np.int64)
    offsets = np.array([s.hist_offset or 0 for s in summaries], np.int64)
    values = np.concatenate(counts).astype(np.int64) if counts else np.zeros(0, np.int64)
    offset, together = merge_histograms(offsets, ends, values, np.zeros(1, np.int64))[0]
    return {"hist_offset": offset, "hist_counts": together}


def scaled(summary: Summary, factor: float) -> Summary:
    """Return the statistics of a tensor divided by a positive number."""
    return replace(
        summary,
        hash=None,
        hist_offset=None,
        hist_counts=None,
        **{name: getattr(summary, name) / factor for name in SCALED},
    )


def elements_of(
    pieces: Sequence[Piece], arrangement: Arrangement, shape: Shape, kept: KeptElements
) -> WholeElements | None:
    """Return the elements that were kept of a whole, each with its position; None when any piece has none."""
    values: list[Array] = []
    at: list[Positions] = []
    kinds: list[str] = []
    for piece in pieces:
        record = piece.record
        entry = kept.best(call_of(record))
        index = arrangement.positions(piece, shape)
        if entry is None or index is None:
            return None
        array = kept.read(entry)
        positions = kept.positions(entry.key, array, record.summary.shape)
        if positions is None:
            return None
        values.append(array)
        at.append(index[positions])
        kinds.append(entry.key.kind)
    kind = kinds[0] if len(set(kinds)) == 1 else "sample"
    together = WholeElements(kind, np.concatenate(values), np.concatenate(at))
    return _summed(together, shape) if arrangement.summed else together


def _summed(parts: WholeElements, shape: Shape) -> WholeElements:
    """Add up what several pieces have for one position."""
    whole = np.zeros(int(np.prod(shape)), np.float64)
    np.add.at(whole, parts.at, parts.values.astype(np.float64))
    at = np.unique(parts.at)
    return WholeElements(parts.kind, whole[at], at)


def common_whole_elements(a: WholeElements | None, b: WholeElements | None, factor: float) -> CommonElements | None:
    """Return the elements kept of both wholes, in one order, those of `b` divided by the factor."""
    if a is None or b is None:
        return None
    _, in_a, in_b = np.intersect1d(a.at, b.at, return_indices=True)
    if not in_a.size:
        return None
    x, y = a.values[in_a], b.values[in_b]
    if factor != 1.0:
        y = _divided(y, factor)
    kind = "full" if a.kind == b.kind == "full" else "sample"
    return CommonElements(kind, x, y)


def _divided(values: Array, factor: float) -> npt.NDArray[np.float64]:
    return np.asarray(values.astype(np.float64) / factor)
