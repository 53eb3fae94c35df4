"""What single cells say, the same in every table."""

from __future__ import annotations

from tensortap import text
from tensortap.reduce.summary import Summary
from tensortap.sinks.line import dead, nonfinite
from tensortap.types import DTYPES

SHORT = {dtype.name: dtype.short for dtype in DTYPES}
ALARM = "bold red"
WARN = "yellow"


def bad(summary: Summary) -> str:
    """How much is NaN or infinite: `nan 12% inf 1%`, or 0."""
    infinite = summary.posinf + summary.neginf
    parts = [(name, count) for name, count in (("nan", summary.nan), ("inf", infinite)) if count]
    return " ".join(f"{name} {text.percent(count, summary.numel)}" for name, count in parts) or "0"


def zeros(summary: Summary) -> str:
    """The share of zeros."""
    return text.percent(summary.zeros, summary.numel)


def stat(summary: Summary, name: str) -> str:
    """A statistic; a dash when no element is finite."""
    return text.number(summary[name]) if summary.finite else "–"


def bad_style(summary: Summary) -> str:
    """Red when there is anything to be red about."""
    return ALARM if nonfinite(summary) else ""


def zeros_style(summary: Summary) -> str:
    """Yellow when it is dead."""
    return WARN if dead(summary) else ""
