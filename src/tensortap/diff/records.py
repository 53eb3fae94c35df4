"""Compare one record with its partner: statistics, histograms, and elements where both runs kept them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from tensortap.diff.elements import CommonElements
from tensortap.diff.metrics import (
    LargestDifference,
    elements,
    histograms,
    relative,
    rms_of,
    scaled_differences,
    statistics,
)
from tensortap.diff.pair import Pair
from tensortap.diff.tolerance import Tolerance
from tensortap.record.step import Record
from tensortap.reduce.summary import Summary

_EXACT: Final = ("int", "uint", "bool")  # types of which any other bit is another value


def compare_records(
    a: Record,
    b: Record,
    tolerance: Tolerance,
    kept: CommonElements | None,
    *,
    rank: int | None = None,
) -> Pair:
    """Return how far two records differ; `kept` are the elements that both runs kept, in one order."""
    x, y = a.summary, b.summary
    known: dict[str, Any] = {
        "step": a.step, "step_b": b.step, "rank": a.rank if rank is None else rank, "site": str(a.place),
        "site_b": str(b.place), "call": a.call, "seq": a.seq, "dtype": x.dtype, "dtype_b": y.dtype,
        "shape": x.shape, "shape_b": y.shape, "rtol": tolerance.rtol, "atol": tolerance.atol, "phase": a.phase,
        "hash_equal": None if x.hash is None or y.hash is None else float(x.hash == y.hash),
    }  # fmt: skip
    if x.numel != y.numel:
        note = f"shape {_shape(x.shape)} in a, {_shape(y.shape)} in b"
        return Pair(**known, error=math.inf, excess=math.inf, of="shape", note=note)
    differences = scaled_differences(x, y)
    gap = statistics(x, y, differences, tolerance)
    if known["hash_equal"] == 0 and x.dtype == y.dtype and x.dtype.startswith(_EXACT):
        gap = LargestDifference(gap.error, math.inf, "hash")
    known |= relative(differences)
    if distance := histograms(x, y):
        known |= distance._asdict()
    if kept is not None:
        found = elements(kept.a, kept.b, tolerance, rms_of(x))
        known |= {name: getattr(found, name) for name in ("max_abs", "max_rel", "nl2", "cosine", "sqnr", "bit_equal")}
        known |= {"kept": kept.kind, "elements": kept.a.size}
        if found.excess >= gap.excess:
            return Pair(
                **known, error=found.error, excess=found.excess, of="elements", note=_nonfinite(x, y, found.misplaced)
            )
    return Pair(**known, error=gap.error, excess=gap.excess, of=gap.of, note=_nonfinite(x, y, gap.of in ("nan", "inf")))


def _nonfinite(x: Summary, y: Summary, misplaced: int) -> str:
    """Return what is NaN or infinite in one but not the other, in words."""
    if not misplaced:
        return ""
    for name, count_a, count_b in (
        ("NaN", x.nan, y.nan),
        ("Inf", x.posinf, y.posinf),
        ("−Inf", x.neginf, y.neginf),
    ):
        if count_a != count_b:
            return f"{name} in {count_a} of {x.numel} elements in a, in {count_b} in b"
    return f"NaN or Inf at other places: {misplaced} elements"


def _shape(shape: Iterable[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def to_the_last_bit(pair: Pair) -> Pair:
    """Return the pair as a comparison of bits sees it: whatever is not equal differs beyond every tolerance."""
    same = not pair.error and not pair.tv if pair.hash_equal is None else pair.hash_equal == 1
    if pair.bit_equal is not None and pair.hash_equal is None:
        same = same and pair.bit_equal == 1
    if same and pair.dtype == pair.dtype_b and pair.shape == pair.shape_b:
        return replace(pair, error=0.0, excess=0.0, rtol=0.0, atol=0.0)
    note = pair.note or ("" if pair.error else "its bits differ, its statistics do not")
    return replace(pair, excess=math.inf, rtol=0.0, atol=0.0, note=note)
