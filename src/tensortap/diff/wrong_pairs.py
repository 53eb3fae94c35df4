"""Tell sites that were paired wrongly from sites that differ.

Where names do not match, sites are paired by order and shape, and an optimised graph may have fused two values into
one: the output of a Linear is then paired with that of a fused Gemm and Relu. A true difference also shows in whatever
is computed from it; if everything after a pair agrees, the two sites were not a true pair.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensortap.diff.align import Alignment
from tensortap.diff.cause import port_of
from tensortap.diff.result import SiteDiff
from tensortap.select.ports import FORWARD_STAGE, stage_of


def wrong_pairs(rows: Iterable[SiteDiff], aligned: Alignment) -> dict[str, str]:
    """Return the sites that were paired by order and differ, with their partners, while all after them agree."""
    by_order = {str(place) for place in aligned.ordered}
    wrong: dict[str, str] = {}
    agreed = False  # something behind it
    for row in sorted(rows, key=lambda row: -row.worst.seq):
        if stage_of(port_of(row.site)) != FORWARD_STAGE:
            continue
        if not row.differs:
            agreed = True
        elif agreed and row.site in by_order:
            wrong[row.site] = row.worst.site_b
        else:
            break
    return wrong


def without_pairs(aligned: Alignment, wrong: dict[str, str]) -> Alignment:
    """Return the alignment without some pairs: their sites have no partner."""
    pairs = {a: b for a, b in aligned.pairs.items() if str(a) not in wrong}
    gone = [(a, b) for a, b in aligned.pairs.items() if str(a) in wrong]
    return aligned._replace(
        pairs=pairs,
        only_in_a=(*aligned.only_in_a, *(a for a, _ in gone)),
        only_in_b=(*aligned.only_in_b, *(b for _, b in gone)),
        ordered=frozenset(pairs) & aligned.ordered,
        wrong=tuple(f"{a} → {b}" for a, b in gone),
    )
