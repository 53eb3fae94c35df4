"""When: triggers decide which steps are kept.

A trigger has two halves. `before(step)` is asked when the step begins, and a step it says NO to costs nothing;
`after(step, seen)` is asked once for every closed step, when the metrics are known. What can only be known afterwards
answers MAYBE before: the step is then kept in memory until its end, and recorded or dropped there. May import what
`select` may.
"""

from tensortap.select.triggers.base import Answer, Trigger, TriggerLike
from tensortap.select.triggers.desync import desync
from tensortap.select.triggers.measured import Metric, following, metric, nonfinite, spike
from tensortap.select.triggers.schedule import as_trigger, at, between, chance, every, first, powers_of

__all__ = [
    "Answer",
    "Metric",
    "Trigger",
    "TriggerLike",
    "as_trigger",
    "at",
    "between",
    "chance",
    "desync",
    "every",
    "first",
    "following",
    "metric",
    "nonfinite",
    "powers_of",
    "spike",
]
