"""A record as one line for people, and whether it is one to worry about."""

from __future__ import annotations

from typing import Final

from tensortap import text
from tensortap.record.step import Record
from tensortap.reduce.summary import Summary, describe

DEAD_SHARE: Final = 0.99


def line(record: Record) -> str:
    """Step, place and statistics: `step 12 fc:output [8,128] f32 mean 0.013 … nan 0 ▁▂▅█▅▂▁`."""
    rank = f" rank {record.rank}" if record.rank else ""
    call = f" call {record.call}" if record.call else ""
    own = "".join(f" {printable(name)} {text.number(value)}" for name, value in record.numbers.items())
    return f"step {record.step}{rank} {printable(str(record.place))}{call} {describe(record.summary)}{own}"


def printable(name: str) -> str:
    r"""A name that can neither break a line nor steer a terminal.

    >>> printable("fc\n\x1b[31m")
    'fc\\n\\x1b[31m'
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def nonfinite(summary: Summary) -> int:
    """How many elements are NaN or infinite."""
    return summary.nan + summary.posinf + summary.neginf


def dead(summary: Summary) -> bool:
    """Whether (nearly) every element is zero, in a tensor with more than one."""
    return summary.numel > 1 and summary.zeros >= DEAD_SHARE * summary.numel
