"""What `when=` accepts."""

from __future__ import annotations

from tensortap.select.triggers.base import Trigger, TriggerLike, coerce
from tensortap.select.triggers.schedule import every


def as_trigger(value: TriggerLike | None) -> Trigger:
    """What `when=` accepts: a trigger, None for every step, or a function `(step, metrics) -> bool`.

    >>> from tensortap.types import StepOutcome
    >>> as_trigger(None)
    every(1)
    >>> as_trigger(lambda step, metrics: step > 10 and metrics["loss"] > 1).after(11, StepOutcome({"loss": 2.0}))
    '<lambda>'
    """
    return every(1) if value is None else coerce(value)
