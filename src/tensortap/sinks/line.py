"""Format a record as one line, and tell whether it is suspicious."""

from __future__ import annotations

from typing import Final

from tensortap import text
from tensortap.record.step import Record
from tensortap.reduce.summary import Summary, describe

DEAD_SHARE: Final = 0.99


def line(record: Record) -> str:
    """Return step, place and statistics: `step 12 fc:output [8,128] f32 mean 0.013 … nan 0 ▁▂▅█▅▂▁`."""
    rank = f" rank {record.rank}" if record.rank else ""
    call = f" call {record.call}" if record.call else ""
    own = "".join(f" {text.printable(name)} {text.number(value)}" for name, value in record.numbers.items())
    return f"step {record.step}{rank} {text.printable(str(record.place))}{call} {describe(record.summary)}{own}"


def nonfinite(summary: Summary) -> int:
    """Return how many elements are NaN or infinite."""
    return summary.nan + summary.posinf + summary.neginf


def dead(summary: Summary) -> bool:
    """Return whether (nearly) every element of a tensor with more than one is zero."""
    return summary.numel > 1 and summary.zeros >= DEAD_SHARE * summary.numel
