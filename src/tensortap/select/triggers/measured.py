"""Triggers that only the closed step can answer: its metrics, its tensors, and what came before."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, NoReturn

from tensortap.errors import ProbeError
from tensortap.select.triggers.base import (
    Answer,
    Incomplete,
    Trigger,
    TriggerLike,
    coerce,
    is_real,
    is_whole,
    maker,
    metric_name,
    whole,
)
from tensortap.types import StepOutcome


class Metric(Incomplete):
    """A metric's name, to be compared with a number. Where the metric is missing or NaN, no comparison holds.

    >>> metric("loss") > 1.0
    metric('loss') > 1.0
    """

    def __init__(self, name: str) -> None:
        self.name = metric_name(name, "metric")

    def __gt__(self, value: float) -> Trigger:
        return _Comparison(self.name, ">", value)

    def __lt__(self, value: float) -> Trigger:
        return _Comparison(self.name, "<", value)

    def __ge__(self, value: float) -> Trigger:
        return _Comparison(self.name, ">=", value)

    def __le__(self, value: float) -> Trigger:
        return _Comparison(self.name, "<=", value)

    def __eq__(self, value: object) -> NoReturn:
        raise ProbeError(f"{self} == {value!r} is not supported, floats are rarely equal: use >, <, >= or <=")

    def hint(self) -> str:
        """Return what to write instead."""
        return f"a metric must be compared to be a trigger, got {self}: write ({self} > 1.0), in parentheses"

    def _bare(self, *_: object) -> NoReturn:
        raise ProbeError(self.hint())

    __bool__ = __invert__ = __or__ = __ror__ = __and__ = __rand__ = _bare

    def __repr__(self) -> str:
        return f"metric({self.name!r})"


@maker
def metric(name: str) -> Metric:
    """Return the metric passed as `tap.step(name=...)`, to be compared: `metric("loss") > 1.0`."""
    return Metric(name)


_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


class _Comparison(Trigger):
    bracketed = True

    def __init__(self, name: str, sign: str, value: float) -> None:
        if not is_real(value) or math.isnan(value):
            raise ProbeError(
                f"a metric must be compared with a number, got {sign} {value!r}: write metric({name!r}) {sign} 1.0"
            )
        self.name, self.sign = name, sign
        self.value = int(value) if is_whole(value) else float(value)

    def after(self, step: int, seen: StepOutcome) -> str | None:
        value = seen.metrics.get(self.name)
        return str(self) if value is not None and _COMPARE[self.sign](value, self.value) else None

    def metrics(self) -> frozenset[str]:
        return frozenset([self.name])

    def __repr__(self) -> str:
        return f"metric({self.name!r}) {self.sign} {self.value!r}"


class Comparison(NamedTuple):
    """A comparison of a metric with a number."""

    name: str
    sign: str
    value: float


def comparison(trigger: Trigger) -> Comparison | None:
    """Return what a trigger compares, where that is all it does: a compiled graph can then decide it.

    >>> comparison(metric("loss") > 1.0)
    Comparison(name='loss', sign='>', value=1.0)
    """
    return Comparison(trigger.name, trigger.sign, trigger.value) if isinstance(trigger, _Comparison) else None


class _Spike(Trigger):
    def __init__(self, name: str, window: int, factor: float) -> None:
        self.name, self.window, self.factor = name, window, factor
        self.history: deque[float] = deque(maxlen=window)

    def after(self, step: int, seen: StepOutcome) -> str | None:
        value = seen.metrics.get(self.name)
        if value is None:
            return None
        if not math.isfinite(value):
            return str(self)
        fired = len(self.history) >= min(self.window, 10) and value > self._limit()
        self.history.append(value)
        return str(self) if fired else None

    def _limit(self) -> float:
        # Summed again each time: in a running sum one huge value would leave its rounding error for ever.
        mean = sum(self.history) / len(self.history)
        if min(self.history) >= 0:
            return self.factor * mean
        widest = max(abs(value - mean) for value in self.history)
        return mean + max((self.factor - 1) * abs(mean), self.factor * widest)

    def metrics(self) -> frozenset[str]:
        return frozenset([self.name])

    def fresh(self) -> Trigger:
        return _Spike(self.name, self.window, self.factor)

    def __repr__(self) -> str:
        return f"spike({self.name!r}, window={self.window}, factor={self.factor})"


@maker
def spike(name: str, window: int = 100, factor: float = 2.0) -> Trigger:
    """Fire when the metric exceeds `factor` × the mean of its last `window` finite values, or is not finite.

    It is silent until min(window, 10) values are known; values that fired count as history too, unless not finite.
    Where a multiple of the mean means little, because some of the values are negative, it fires above
    mean + max((factor - 1) × |mean|, factor × the widest deviation from the mean).
    """
    window = whole(window, 1, "window of spike()", f"spike({name!r}, window=100)")
    if not is_real(factor) or not 1 < factor < math.inf:
        raise ProbeError(f"factor of spike() must be above 1, got {factor!r}: write spike({name!r}, factor=2.0)")
    return _Spike(metric_name(name, "spike"), window, float(factor))


class _NonFinite(Trigger):
    def after(self, step: int, seen: StepOutcome) -> str | None:
        # Metrics first: to ask for the tensors' values may mean to wait for a device.
        return str(self) if not all(map(math.isfinite, seen.metrics.values())) or seen.nonfinite else None

    def __repr__(self) -> str:
        return "nonfinite()"


@maker
def nonfinite() -> Trigger:
    """Fire when a recorded tensor of the step holds NaN or ±Inf, or a metric is not finite."""
    return _NonFinite()


class _Following(Trigger):
    def __init__(self, trigger: Trigger, steps: int) -> None:
        self.trigger, self.steps = trigger, steps
        self.until = -1

    def before(self, step: int) -> Answer:
        return Answer.YES if step <= self.until else Answer.NO

    def after(self, step: int, seen: StepOutcome) -> str | None:
        inside = step <= self.until
        if self.trigger.after(step, seen) is not None:
            self.until = step + self.steps
        return str(self) if inside else None

    def metrics(self) -> frozenset[str]:
        return self.trigger.metrics()

    @property
    def agreed(self) -> bool:
        return self.trigger.agreed

    @property
    def compares_replicas(self) -> bool:
        return self.trigger.compares_replicas

    def fresh(self) -> Trigger:
        return _Following(self.trigger.fresh(), self.steps)

    def __repr__(self) -> str:
        return f"following({self.trigger}, {self.steps})"


@maker
def following(trigger: TriggerLike, steps: int = 10) -> Trigger:
    """Fire at the steps after one at which another trigger fires: nothing costs anything until then.

    >>> when = following(nonfinite(), 2)
    >>> [when.after(step, StepOutcome({}, nonfinite=step == 3)) is not None for step in range(7)]
    [False, False, False, False, True, True, False]
    """
    return _Following(coerce(trigger), whole(steps, 1, "following(trigger, steps)", "following(nonfinite(), 10)"))
