"""Tell partial sums that are added up later from those that never are.

A tensor-parallel layer that is written by hand often leaves its part of a sum on every rank, and an all-reduce between
modules makes the whole of it. So values that add up to the reference are pending: they are right where the module that
holds this one, or whoever uses the value, has the whole; and wrong where the next difference comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tensortap.diff.elements import CommonElements
from tensortap.diff.layouts import PairedWhole
from tensortap.diff.metrics import rms_of
from tensortap.diff.pair import Pair
from tensortap.diff.pieces import fingerprint
from tensortap.select.ports import MODULE_PORTS

_ADDS_UP: Final = 1e-2
_MOST: Final = 0.1  # of the norm, whatever the tolerance
Compared = tuple[PairedWhole, Pair]


def add_up(group: Sequence[Compared], kept: Sequence[CommonElements | None]) -> bool:
    """Return whether what copies hold adds up to the reference: element by element where kept, else by the mean."""
    arrays = [common for common in kept if common is not None]
    wanted, rounding = group[0][0].a.record.summary, min(max(_ADDS_UP, group[0][1].rtol), _MOST)
    if len(arrays) < len(kept):
        means = [paired.summaries[1].mean for paired, _ in group]
        scale = rounding * rms_of(wanted)
        return bool(abs(sum(means) - wanted.mean) <= scale < abs(means[0] - wanted.mean))
    parts = [common.b.astype(np.float64) for common in arrays]
    total, whole = sum(parts), arrays[0].a.astype(np.float64)
    scale = max(float(np.linalg.norm(whole)), *(float(np.linalg.norm(part)) for part in parts))
    return bool(np.linalg.norm(total - whole) <= rounding * scale)


def settled(compared: Sequence[Compared]) -> list[Pair]:
    """Return the pairs of a step, in order; pending sums that are complete later are no differences."""
    pairs = [pair for _, pair in compared]
    pending: list[int] = []
    for i, (paired, pair) in enumerate(compared):
        if _is_pending(paired, pair):
            pending.append(i)
        elif pair.differs:
            return pairs
        else:
            done = [n for n in pending if _has_whole_of(paired, compared[n][0])]
            for n in done:
                pairs[n] = _within(pairs[n])
            pending = [n for n in pending if n not in done]
    last = max((i for i, pair in enumerate(pairs) if not pair.differs), default=-1)
    for n in (n for n in pending if n < last):  # nothing that was computed of it later differs
        pairs[n] = _within(pairs[n])
    return pairs


NOTE: Final = "the {} ranks' values add up to it: they are partial sums that were not reduced"
_NOTE_END: Final = NOTE.partition("{}")[2]


def _is_pending(paired: PairedWhole, pair: Pair) -> bool:
    return paired.place.port in MODULE_PORTS and pair.differs and pair.note.endswith(_NOTE_END)


def _within(pair: Pair) -> Pair:
    return replace(pair, error=0.0, excess=0.0, note="partial sums of ranks, reduced outside of the module")


def _has_whole_of(later: PairedWhole, pending: PairedWhole) -> bool:
    """Return whether a later value that agrees is that of an enclosing module, or the same value."""
    if later.place.port not in MODULE_PORTS:
        return False
    site, inner = later.place.site, pending.place.site
    encloses = later.place.port == pending.place.port and (not site or inner.startswith(f"{site}."))
    return encloses or fingerprint(later.a.record) == fingerprint(pending.a.record)
