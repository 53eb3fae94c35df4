"""What a trigger is, how triggers combine, how a function becomes one, and checks of their arguments."""

from __future__ import annotations

import copy
import enum
import inspect
import numbers
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

from tensortap.errors import ProbeError
from tensortap.types import StepOutcome

MAKERS: Final[list[Callable[..., Any]]] = []
Maker = TypeVar("Maker", bound=Callable[..., Any])


def maker(function: Maker) -> Maker:
    """Register a function that makes triggers, so that passing it uncalled gives an error of its own."""
    MAKERS.append(function)
    return function


# Checks of the arguments of triggers. Each error shows the corrected call.


def is_whole(value: object) -> bool:
    """Return whether it is an integer of any library and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Return whether it is a real number of any library and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole(value: int, least: int, what: str, corrected: str) -> int:
    """Return the value as an int, or raise unless it is a whole number of at least `least`."""
    if not is_whole(value) or value < least:
        raise ProbeError(f"{what} must be a whole number, at least {least}, got {value!r}: write {corrected}")
    return int(value)


def metric_name(name: str, what: str) -> str:
    """Return the name of a metric, or raise."""
    if not isinstance(name, str) or not name:
        raise ProbeError(f"{what}() must be given the name of a metric, got {name!r}: write {what}('loss')")
    return name


class Incomplete:
    """An object that needs one more call or comparison to become a trigger."""

    def hint(self) -> str:
        """Return what to write instead."""
        raise NotImplementedError


class Answer(enum.IntEnum):
    """The answer of a trigger before the step runs. Ordered, so that `|` is max and `&` is min."""

    NO = 0
    MAYBE = 1
    YES = 2


class Trigger:
    """Decide which steps are kept; combine with `|`, `&`, `~`. Subclasses need only `after`.

    >>> from tensortap.select.triggers import every, metric
    >>> when = every(100) | (metric("loss") > 1.0)
    >>> when.before(7).name, when.before(100).name
    ('MAYBE', 'YES')
    >>> when.after(7, StepOutcome({"loss": 3.0}))
    "metric('loss') > 1.0"
    """

    bracketed: ClassVar[bool] = False  # inside a larger expression its text needs brackets

    @property
    def scheduled(self) -> bool:
        """Whether the step's number alone decides, so that every process decides the same, and before the step."""
        return False

    @property
    def always(self) -> bool:
        """Whether it wants every step, so that it need not be called."""
        return False

    @property
    def agreed(self) -> bool:
        """Whether all ranks decide the same, given what `watch(global_stats=True)` lets them share."""
        return self.scheduled or self.compares_replicas

    @property
    def compares_replicas(self) -> bool:
        """Whether it asks if ranks hold the same, so that their hashes must be compared."""
        return False

    def before(self, step: int) -> Answer:
        """Return whether `step` will be kept, as far as its number tells."""
        return Answer.MAYBE

    def after(self, step: int, seen: StepOutcome) -> str | None:
        """Return why the closed `step` is kept, or None. Called exactly once for every closed step."""
        raise NotImplementedError(f"{type(self).__name__} must define after(step, seen)")

    def metrics(self) -> frozenset[str]:
        """Return the names of the metrics it reads."""
        return frozenset()

    def fresh(self) -> Trigger:
        """Return a copy with empty history. A subclass that keeps history and may be reused overrides this."""
        return copy.deepcopy(self)

    def __or__(self, other: TriggerLike) -> Trigger:
        return _Either(self, coerce(other))

    def __ror__(self, other: TriggerLike) -> Trigger:
        return _Either(coerce(other), self)

    def __and__(self, other: TriggerLike) -> Trigger:
        return _Both(self, coerce(other))

    def __rand__(self, other: TriggerLike) -> Trigger:
        return _Both(coerce(other), self)

    def __invert__(self) -> Trigger:
        return _Not(self)

    def __bool__(self) -> bool:
        raise ProbeError(
            f"{self} is decided at each step and has no truth value here: use & and | instead of `and`, `or`, "
            'and (metric("loss") > 0) & (metric("loss") < 1) instead of 0 < metric("loss") < 1'
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


TriggerLike = Trigger | Callable[[int, Mapping[str, float]], bool]


class _Pair(Trigger):
    sign: ClassVar[str]
    needed: ClassVar[int]

    def __init__(self, left: Trigger, right: Trigger) -> None:
        self.left, self.right = left, right

    def after(self, step: int, seen: StepOutcome) -> str | None:
        # Both are called whatever the first returns: a spike must see every step to know its history.
        asked = [side.after(step, seen) for side in (self.left, self.right)]
        reasons = [reason for reason in asked if reason is not None]
        return f" {self.sign} ".join(reasons) if len(reasons) >= self.needed else None

    @property
    def scheduled(self) -> bool:
        return self.left.scheduled and self.right.scheduled

    @property
    def agreed(self) -> bool:
        return self.left.agreed and self.right.agreed

    @property
    def compares_replicas(self) -> bool:
        return self.left.compares_replicas or self.right.compares_replicas

    def metrics(self) -> frozenset[str]:
        return self.left.metrics() | self.right.metrics()

    def fresh(self) -> Trigger:
        return type(self)(self.left.fresh(), self.right.fresh())

    def __repr__(self) -> str:
        return f"({nested(self.left)} {self.sign} {nested(self.right)})"


class _Either(_Pair):
    sign, needed = "|", 1

    def before(self, step: int) -> Answer:
        return max(self.left.before(step), self.right.before(step))


class _Both(_Pair):
    sign, needed = "&", 2

    def before(self, step: int) -> Answer:
        return min(self.left.before(step), self.right.before(step))


class _Not(Trigger):
    def __init__(self, inner: Trigger) -> None:
        self.inner = inner

    def before(self, step: int) -> Answer:
        return Answer(Answer.YES - self.inner.before(step))

    def after(self, step: int, seen: StepOutcome) -> str | None:
        return str(self) if self.inner.after(step, seen) is None else None

    @property
    def scheduled(self) -> bool:
        return self.inner.scheduled

    @property
    def agreed(self) -> bool:
        return self.inner.agreed

    @property
    def compares_replicas(self) -> bool:
        return self.inner.compares_replicas

    def metrics(self) -> frozenset[str]:
        return self.inner.metrics()

    def fresh(self) -> Trigger:
        return _Not(self.inner.fresh())

    def __repr__(self) -> str:
        return f"~{nested(self.inner)}"


def nested(trigger: Trigger) -> str:
    """Return a trigger's text inside a larger one's."""
    return f"({trigger})" if trigger.bracketed else str(trigger)


class _Predicate(Trigger):
    def __init__(self, function: Callable[[int, Mapping[str, float]], bool]) -> None:
        self.function = function
        self.text: str = getattr(function, "__name__", type(function).__name__)

    def after(self, step: int, seen: StepOutcome) -> str | None:
        return self.text if self.function(step, seen.metrics) else None

    def fresh(self) -> Trigger:
        return self  # the function and whatever it remembers are the user's

    def __repr__(self) -> str:
        return self.text


def coerce(value: object) -> Trigger:
    """Return a trigger, or a function as one; anything else is an error that says what to write."""
    if isinstance(value, Trigger):
        return value
    if not callable(value) or isinstance(value, type) or value in MAKERS:
        raise ProbeError(_hint(value))
    try:
        inspect.signature(value).bind(0, {})
    except TypeError as error:
        raise ProbeError(f"a function as trigger must be (step, metrics) -> bool, got {value!r}: {error}") from error
    except ValueError:
        pass  # some built-ins do not tell their signature
    return _Predicate(value)


def _hint(value: object) -> str:
    match value:
        case Incomplete():
            return value.hint()
        case int() | float():
            n = int(value) if 1 <= value < sys.maxsize else 1
            instead = f"write every({n}), or put comparisons in parentheses: (metric('loss') > {value})"
        case list() | tuple() | set() | frozenset() | range():
            instead = f"write at({value!r})"
        case _ if callable(value):
            instead = f"call it, as in {getattr(value, '__name__', value)}()"
        case _:
            instead = "write every(100), metric('loss') > 1.0, nonfinite() or a function (step, metrics) -> bool"
    return f"when= must be a trigger, got {value!r}: {instead}"
