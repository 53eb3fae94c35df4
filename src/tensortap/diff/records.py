"""Compare one record with its partner: statistics, histograms, and elements where both runs kept them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tensortap.diff.elements import CommonElements
from tensortap.diff.metrics import elements, histograms, relative, rms_of, statistics
from tensortap.diff.pair import Pair
from tensortap.diff.tolerance import Tolerance
from tensortap.record.step import Record
from tensortap.reduce.summary import Summary


def compare_records(
    a: Record,
    b: Record,
    tolerance: Tolerance,
    kept: CommonElements | None,
    *,
    site_b: str = "",
    rank: int | None = None,
) -> Pair:
    """Return how far two records differ; `kept` are the elements that both runs kept, in one order."""
    x, y = a.summary, b.summary
    known: dict[str, Any] = {
        "step": a.step, "step_b": b.step, "rank": a.rank if rank is None else rank, "site": str(a.place),
        "site_b": site_b or str(b.place), "call": a.call, "seq": a.seq, "dtype": x.dtype, "dtype_b": y.dtype,
        "shape": x.shape, "shape_b": y.shape, "rtol": tolerance.rtol, "atol": tolerance.atol,
    }  # fmt: skip
    if x.numel != y.numel:
        note = f"shape {_shape(x.shape)} in a, {_shape(y.shape)} in b"
        return Pair(**known, error=math.inf, excess=math.inf, of="shape", note=note)
    gap = statistics(x, y, tolerance)
    known |= relative(x, y)
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
