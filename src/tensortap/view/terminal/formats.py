"""Text and style of single numbers, the same in every table."""

from __future__ import annotations

import math

from tensortap import text
from tensortap.reduce.summary import Summary
from tensortap.sinks.line import dead, nonfinite
from tensortap.types import DTYPES

SHORT_DTYPES = {dtype.name: dtype.short for dtype in DTYPES}
ALARM = "bold red"
WARN = "yellow"
NOTHING = "–"


def nonfinite_text(summary: Summary) -> str:
    """Return the share that is NaN or infinite: `nan 12% inf 1%`, or 0; a dash where the tensor has no values."""
    if not has_values(summary):
        return NOTHING
    infinite = summary.posinf + summary.neginf
    parts = [(name, count) for name, count in (("nan", summary.nan), ("inf", infinite)) if count]
    return " ".join(f"{name} {text.percent(count, summary.numel)}" for name, count in parts) or "0"


def zeros_text(summary: Summary) -> str:
    """Return the share of zeros; a dash where the tensor has no values."""
    return text.percent(summary.zeros, summary.numel) if has_values(summary) else NOTHING


def stat_text(summary: Summary, name: str) -> str:
    """Return a statistic; a dash when no element is finite, or the tensor has no values."""
    return text.number(summary[name]) if summary.finite and has_values(summary) else NOTHING


def has_values(summary: Summary) -> bool:
    """Return whether the tensor had values: one on the meta device, or of a compiler's own, has only a shape."""
    return not (summary.finite and math.isnan(summary.mean) and math.isnan(summary.min))


def nonfinite_style(summary: Summary) -> str:
    """Return red when anything is NaN or infinite."""
    return ALARM if nonfinite(summary) else ""


def zeros_style(summary: Summary) -> str:
    """Return yellow when the tensor is dead."""
    return WARN if dead(summary) else ""
