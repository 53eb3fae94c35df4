"""Triggers that the step's number alone decides: their answer before the step is final."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass

from tensortap.errors import ProbeError
from tensortap.select.triggers.base import Answer, Trigger, TriggerLike, coerce, is_real, is_whole, maker, whole
from tensortap.types import StepOutcome


class _Scheduled(Trigger):
    """The step's number alone decides."""

    def __init__(self, text: str, steps: Container[int]) -> None:
        self.text, self.steps = text, steps

    @property
    def scheduled(self) -> bool:
        return True

    @property
    def always(self) -> bool:
        return self.steps == range(sys.maxsize)

    def before(self, step: int) -> Answer:
        return Answer.YES if step in self.steps else Answer.NO

    def after(self, step: int, seen: StepOutcome) -> str | None:
        return self.text if step in self.steps else None

    def __repr__(self) -> str:
        return self.text


@maker
def every(n: int, start: int = 0, stop: int | None = None) -> Trigger:
    """Fire at steps start, start + n, start + 2n, … below `stop`.

    >>> [step for step in range(20) if every(5, start=3).before(step) is Answer.YES]
    [3, 8, 13, 18]
    """
    n = whole(n, 1, "n of every(n)", "every(100)")
    start = whole(start, 0, "start of every()", f"every({n}, start=0)")
    if stop is not None:
        stop = whole(stop, start + 1, "stop of every()", f"every({n}, start={start}, stop={start + n})")
    bounds = (f", start={start}" if start else "") + (f", stop={stop}" if stop is not None else "")
    return _Scheduled(f"every({n}{bounds})", range(start, sys.maxsize if stop is None else stop, n))


@maker
def at(steps: Iterable[int]) -> Trigger:
    """Fire at exactly these steps: `at([0, 10, 500])`."""
    if isinstance(steps, str | bytes) or not isinstance(steps, Iterable):
        raise ProbeError(
            f"at() must be given a list of steps, got {steps!r}: write at([{repr(steps) if is_whole(steps) else 10}])"
        )
    chosen = sorted({whole(step, 0, "a step of at()", "at([0, 10])") for step in steps})
    if not chosen:
        raise ProbeError("at() must be given at least one step, got []: write at([0, 10])")
    more = f", … {len(chosen) - 8} more" if len(chosen) > 8 else ""
    return _Scheduled(f"at([{', '.join(map(str, chosen[:8]))}{more}])", frozenset(chosen))


@maker
def between(a: int, b: int) -> Trigger:
    """Fire at every step from `a` (included) to `b` (not included), as `range(a, b)`."""
    a = whole(a, 0, "a of between(a, b)", "between(0, 100)")
    b = whole(b, a + 1, "b of between(a, b)", f"between({a}, {a + 100})")
    return _Scheduled(f"between({a}, {b})", range(a, b))


@maker
def first(n: int) -> Trigger:
    """Fire at the first `n` steps: 0 … n - 1."""
    n = whole(n, 1, "n of first(n)", "first(10)")
    return _Scheduled(f"first({n})", range(n))


@maker
def powers_of(base: int) -> Trigger:
    """Fire at steps 1, base, base², …: often at the beginning, seldom later. Step 0 is not one; add `| at([0])`.

    >>> [step for step in range(20) if powers_of(2).before(step) is Answer.YES]
    [1, 2, 4, 8, 16]
    """
    base = whole(base, 2, "base of powers_of(base)", "powers_of(2)")
    return _Scheduled(f"powers_of({base})", _Powers(base))


@maker
def chance(p: float, seed: int = 0) -> Trigger:
    """Fire at each step with probability `p`: a function of (seed, step), so every process picks the same steps.

    >>> [step for step in range(50) if chance(0.1, seed=1).before(step) is Answer.YES]
    [6, 20, 23, 40, 45]
    """
    if not is_real(p) or not 0 <= p <= 1:
        raise ProbeError(f"p of chance(p) must be between 0 and 1, got {p!r}: write chance(0.01)")
    if not is_whole(seed):
        raise ProbeError(f"seed of chance() must be a whole number, got {seed!r}: write chance({float(p)}, seed=0)")
    return _Scheduled(f"chance({float(p)}{f', seed={seed}' if seed else ''})", _Lot(float(p), int(seed)))


def as_trigger(value: TriggerLike | None) -> Trigger:
    """Return what `when=` was given as a trigger; None means every step, a function is `(step, metrics) -> bool`.

    >>> from tensortap.types import StepOutcome
    >>> as_trigger(None)
    every(1)
    >>> as_trigger(lambda step, metrics: step > 10 and metrics["loss"] > 1).after(11, StepOutcome({"loss": 2.0}))
    '<lambda>'
    """
    return every(1) if value is None else coerce(value)


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
    """Return splitmix64's output for a 64-bit state, without touching the user's random generators."""
    mask = 2**64 - 1
    z = state * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31
