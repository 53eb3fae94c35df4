"""Compare two runs and report the first divergence.

Holds: the pairing of sites (`align`), tolerances, the distances between records (`metrics`) and kept elements, the
result. May import `store`, `sinks` (for printing), `reduce` and what lies below; never `watch` or an adapter.
"""

from tensortap.diff.pair import Pair
from tensortap.diff.result import Diff, SiteDiff
from tensortap.diff.runs import diff

__all__ = ["Diff", "Pair", "SiteDiff", "diff"]
