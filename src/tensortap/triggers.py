"""When: triggers decide which steps are kept.

A trigger has two halves. `before(step)` is asked when the step begins, and a step it says NO to costs nothing;
`after(step, seen)` is asked once for every closed step, when the metrics are known. What can only be known afterwards
answers MAYBE before: the step is then held in memory and kept or dropped at its end.
"""

from __future__ import annotations

import copy
import enum
import inspect
import math
import numbers
import operator
import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, NoReturn

from tensortap.errors import ProbeError
from tensortap.types import Seen


class Answer(enum.IntEnum):
    """What a trigger can say before the step runs. Ordered, so that `|` is max and `&` is min."""

    NO = 0
    MAYBE = 1
    YES = 2


class Trigger:
    """Decides which steps are kept; combine with `|`, `&`, `~`. Subclasses need only `after`.

    >>> when = every(100) | (metric("loss") > 1.0)
    >>> when.before(7).name, when.before(100).name
    ('MAYBE', 'YES')
    >>> when.after(7, Seen({"loss": 3.0}))
    "metric('loss') > 1.0"
    """

    def before(self, step: int) -> Answer:
        """Whether `step` will be kept, as far as its number tells."""
        return Answer.MAYBE

    def after(self, step: int, seen: Seen) -> str | None:
        """Why the closed `step` is kept, or None. Asked exactly once for every closed step."""
        raise NotImplementedError(f"{type(self).__name__} must define after(step, seen)")

    def metrics(self) -> frozenset[str]:
        """The names of the metrics it reads."""
        return frozenset()

    def fresh(self) -> Trigger:
        """A copy with empty history. A subclass that keeps history and may be reused overrides this."""
        return copy.deepcopy(self)

    def __or__(self, other: TriggerLike) -> Trigger:
        return _Either(self, _coerce(other))

    def __ror__(self, other: TriggerLike) -> Trigger:
        return _Either(_coerce(other), self)

    def __and__(self, other: TriggerLike) -> Trigger:
        return _Both(self, _coerce(other))

    def __rand__(self, other: TriggerLike) -> Trigger:
        return _Both(_coerce(other), self)

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

    def after(self, step: int, seen: Seen) -> str | None:
        # Both are asked whatever the first says: a spike must see every step to know its history.
        asked = [side.after(step, seen) for side in (self.left, self.right)]
        reasons = [reason for reason in asked if reason is not None]
        return f" {self.sign} ".join(reasons) if len(reasons) >= self.needed else None

    def metrics(self) -> frozenset[str]:
        return self.left.metrics() | self.right.metrics()

    def fresh(self) -> Trigger:
        return type(self)(self.left.fresh(), self.right.fresh())

    def __repr__(self) -> str:
        return f"({_nested(self.left)} {self.sign} {_nested(self.right)})"


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

    def after(self, step: int, seen: Seen) -> str | None:
        return str(self) if self.inner.after(step, seen) is None else None

    def metrics(self) -> frozenset[str]:
        return self.inner.metrics()

    def fresh(self) -> Trigger:
        return _Not(self.inner.fresh())

    def __repr__(self) -> str:
        return f"~{_nested(self.inner)}"


def _nested(trigger: Trigger) -> str:
    return f"({trigger})" if isinstance(trigger, _Comparison) else str(trigger)


class _Scheduled(Trigger):
    """The step's number alone decides."""

    def __init__(self, text: str, steps: Container[int]) -> None:
        self.text, self.steps = text, steps

    def before(self, step: int) -> Answer:
        return Answer.YES if step in self.steps else Answer.NO

    def after(self, step: int, seen: Seen) -> str | None:
        return self.text if step in self.steps else None

    def __repr__(self) -> str:
        return self.text


def every(n: int, start: int = 0, stop: int | None = None) -> Trigger:
    """Steps start, start + n, start + 2n, … below `stop`.

    >>> [step for step in range(20) if every(5, start=3).before(step) is Answer.YES]
    [3, 8, 13, 18]
    """
    n = _whole(n, 1, "n of every(n)", "every(100)")
    start = _whole(start, 0, "start of every()", f"every({n}, start=0)")
    if stop is not None:
        stop = _whole(stop, start + 1, "stop of every()", f"every({n}, start={start}, stop={start + n})")
    bounds = (f", start={start}" if start else "") + (f", stop={stop}" if stop is not None else "")
    return _Scheduled(f"every({n}{bounds})", range(start, sys.maxsize if stop is None else stop, n))


def at(steps: Iterable[int]) -> Trigger:
    """Exactly these steps: `at([0, 10, 500])`."""
    if isinstance(steps, str | bytes) or not isinstance(steps, Iterable):
        raise ProbeError(
            f"at() takes a list of steps, not {steps!r}: write at([{repr(steps) if _is_whole(steps) else 10}])"
        )
    chosen = sorted({_whole(step, 0, "a step of at()", "at([0, 10])") for step in steps})
    if not chosen:
        raise ProbeError("at([]) names no step: write at([0, 10])")
    more = f", … {len(chosen) - 8} more" if len(chosen) > 8 else ""
    return _Scheduled(f"at([{', '.join(map(str, chosen[:8]))}{more}])", frozenset(chosen))


def between(a: int, b: int) -> Trigger:
    """Every step from `a` (included) to `b` (not included), as `range(a, b)`."""
    a = _whole(a, 0, "a of between(a, b)", "between(0, 100)")
    b = _whole(b, a + 1, "b of between(a, b)", f"between({a}, {a + 100})")
    return _Scheduled(f"between({a}, {b})", range(a, b))


def first(n: int) -> Trigger:
    """The first `n` steps: 0 … n - 1."""
    n = _whole(n, 1, "n of first(n)", "first(10)")
    return _Scheduled(f"first({n})", range(n))


def powers_of(base: int) -> Trigger:
    """Steps 1, base, base², …: dense at the beginning, sparse later. Step 0 is no power; add `| at([0])` to have it.

    >>> [step for step in range(20) if powers_of(2).before(step) is Answer.YES]
    [1, 2, 4, 8, 16]
    """
    base = _whole(base, 2, "base of powers_of(base)", "powers_of(2)")
    return _Scheduled(f"powers_of({base})", _Powers(base))


def chance(p: float, seed: int = 0) -> Trigger:
    """Each step with probability `p`: a pure function of (seed, step), so every process picks the same steps.

    >>> [step for step in range(50) if chance(0.1, seed=1).before(step) is Answer.YES]
    [6, 20, 23, 40, 45]
    """
    if not _is_real(p) or not 0 <= p <= 1:
        raise ProbeError(f"p of chance(p) must be between 0 and 1, not {p!r}: write chance(0.01)")
    if not _is_whole(seed):
        raise ProbeError(f"seed of chance() must be a whole number, not {seed!r}: write chance({float(p)}, seed=0)")
    return _Scheduled(f"chance({float(p)}{f', seed={seed}' if seed else ''})", _Lot(float(p), int(seed)))


@dataclass(frozen=True)
class _Powers:
    base: int

    def __contains__(self, step: object) -> bool:
        assert isinstance(step, int)
        while step > 1 and step % self.base == 0:
            step //= self.base
        return step == 1


@dataclass(frozen=True)
class _Lot:
    p: float
    seed: int

    def __contains__(self, step: object) -> bool:
        assert isinstance(step, int)
        drawn = _mix(_mix(self.seed) + step + 1) >> 11
        return drawn < self.p * 2**53


def _mix(state: int) -> int:
    """Splitmix64's output for a 64-bit state: own arithmetic, so no generator of the user's is touched."""
    mask = 2**64 - 1
    z = state * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


class Metric:
    """A metric's name, to be compared with a number. Where the metric is missing or NaN, no comparison holds.

    >>> metric("loss") > 1.0
    metric('loss') > 1.0
    """

    def __init__(self, name: str) -> None:
        self.name = _name(name, "metric")

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

    def _bare(self, *_: object) -> NoReturn:
        raise ProbeError(_hint(self))

    __bool__ = __invert__ = __or__ = __ror__ = __and__ = __rand__ = _bare

    def __repr__(self) -> str:
        return f"metric({self.name!r})"


def metric(name: str) -> Metric:
    """The metric passed as `tap.step(name=...)`, to be compared: `metric("loss") > 1.0`."""
    return Metric(name)


_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


class _Comparison(Trigger):
    def __init__(self, name: str, sign: str, value: float) -> None:
        if not _is_real(value) or math.isnan(value):
            raise ProbeError(f"metric({name!r}) {sign} {value!r}: compare with a number: metric({name!r}) {sign} 1.0")
        self.name, self.sign = name, sign
        self.value = int(value) if _is_whole(value) else float(value)

    def after(self, step: int, seen: Seen) -> str | None:
        value = seen.metrics.get(self.name)
        return str(self) if value is not None and _COMPARE[self.sign](value, self.value) else None

    def metrics(self) -> frozenset[str]:
        return frozenset([self.name])

    def __repr__(self) -> str:
        return f"metric({self.name!r}) {self.sign} {self.value!r}"


class _Spike(Trigger):
    def __init__(self, name: str, window: int, factor: float) -> None:
        self.name, self.window, self.factor = name, window, factor
        self.history: deque[float] = deque(maxlen=window)

    def after(self, step: int, seen: Seen) -> str | None:
        value = seen.metrics.get(self.name)
        if value is None:
            return None
        if not math.isfinite(value):
            return str(self)
        fired = len(self.history) >= min(self.window, 10) and value > self._limit()
        self.history.append(value)
        return str(self) if fired else None

    def _limit(self) -> float:
        # Summed anew, not kept running: one huge value would leave its rounding error behind for ever.
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


def spike(name: str, window: int = 100, factor: float = 2.0) -> Trigger:
    """The metric exceeds `factor` × the mean of its last `window` finite values, or is not finite.

    It is silent until min(window, 10) values are known; values that fired count as history too, unless not finite.
    Where a multiple of the mean means little, because some of the values are negative, it fires above
    mean + max((factor - 1) × |mean|, factor × the widest deviation from the mean).
    """
    window = _whole(window, 1, "window of spike()", f"spike({name!r}, window=100)")
    if not _is_real(factor) or not 1 < factor < math.inf:
        raise ProbeError(f"factor of spike() must be above 1, not {factor!r}: write spike({name!r}, factor=2.0)")
    return _Spike(_name(name, "spike"), window, float(factor))


class _NonFinite(Trigger):
    def after(self, step: int, seen: Seen) -> str | None:
        return str(self) if seen.nonfinite or not all(map(math.isfinite, seen.metrics.values())) else None

    def __repr__(self) -> str:
        return "nonfinite()"


def nonfinite() -> Trigger:
    """Any recorded tensor of the step holds NaN or ±Inf, or any metric is not finite."""
    return _NonFinite()


class _Predicate(Trigger):
    def __init__(self, function: Callable[[int, Mapping[str, float]], bool]) -> None:
        self.function = function
        self.text: str = getattr(function, "__name__", type(function).__name__)

    def after(self, step: int, seen: Seen) -> str | None:
        return self.text if self.function(step, seen.metrics) else None

    def fresh(self) -> Trigger:
        return self  # the function and whatever it remembers are the user's

    def __repr__(self) -> str:
        return self.text


def as_trigger(value: TriggerLike | None) -> Trigger:
    """What `when=` accepts: a trigger, None for every step, or a function `(step, metrics) -> bool`.

    >>> as_trigger(None)
    every(1)
    >>> as_trigger(lambda step, metrics: step > 10 and metrics["loss"] > 1).after(11, Seen({"loss": 2.0}))
    '<lambda>'
    """
    return every(1) if value is None else _coerce(value)


def _coerce(value: object) -> Trigger:
    if isinstance(value, Trigger):
        return value
    if not callable(value) or isinstance(value, type) or value in _CONSTRUCTORS:
        raise ProbeError(_hint(value))
    try:
        inspect.signature(value).bind(0, {})
    except TypeError as error:
        raise ProbeError(f"{value!r} cannot be called as (step, metrics) -> bool: {error}") from error
    except ValueError:
        pass  # some built-ins do not tell their signature
    return _Predicate(value)


_CONSTRUCTORS: Final = (every, at, between, first, powers_of, chance, metric, spike, nonfinite)


def _hint(value: object) -> str:
    match value:
        case Metric():
            return f"{value} is no trigger by itself: compare it, in parentheses: ({value} > 1.0)"
        case int() | float():
            n = int(value) if 1 <= value < sys.maxsize else 1
            instead = f"write every({n}), or put comparisons in parentheses: (metric('loss') > {value})"
        case list() | tuple() | set() | frozenset() | range():
            instead = f"write at({value!r})"
        case _ if callable(value):
            instead = f"it makes one: call it, as in {getattr(value, '__name__', value)}()"
        case _:
            instead = "use every(100), metric('loss') > 1.0, nonfinite() or a function (step, metrics) -> bool"
    return f"{value!r} is no trigger: {instead}"


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _whole(value: int, least: int, what: str, corrected: str) -> int:
    if not _is_whole(value) or value < least:
        raise ProbeError(f"{what} must be a whole number, at least {least}, not {value!r}: write {corrected}")
    return int(value)


def _name(name: str, what: str) -> str:
    if not isinstance(name, str) or not name:
        raise ProbeError(f"{what}() needs a metric's name, not {name!r}: write {what}('loss')")
    return name
