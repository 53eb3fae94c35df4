"""Two runs held against each other: aligned, compared, and where they first part."""

from tensortap.diff.pair import Pair
from tensortap.diff.result import Diff, SiteDiff
from tensortap.diff.runs import diff

__all__ = ["Diff", "Pair", "SiteDiff", "diff"]
