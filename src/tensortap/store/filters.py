"""Convert a reader's request (patterns, step ranges) to filters on the columns."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import pyarrow.compute as pc

from tensortap.errors import PatternError, RunError, suggest
from tensortap.select.operations import GROUPS
from tensortap.select.sites import Candidate, Pattern, split
from tensortap.types import Place

SiteSelection = str | Pattern | Sequence[str | Pattern] | None
StepSelection = int | tuple[int, int] | Sequence[int] | slice | None


def places_matching(sites: str | Pattern | Sequence[str | Pattern], known: Iterable[Place]) -> list[Place]:
    """Return the places that any of the patterns means; an error names the nearest when there is none."""
    patterns = [sites] if isinstance(sites, (str, Pattern)) else list(sites)
    places = list(known)
    found: dict[Place, None] = {}
    for pattern in patterns:
        parsed = Pattern.parse(pattern)
        fitting = [place for place in places if _fits(parsed, place)]
        if not fitting:
            raise PatternError(f"{pattern!s} matches nothing in this run.{suggest(str(pattern), map(str, places))}")
        found.update(dict.fromkeys(fitting))
    return list(found)


def _fits(pattern: Pattern, place: Place) -> bool:
    if str(place) == pattern.text or not pattern.matches_slot(place.slot):
        return str(place) == pattern.text
    if pattern.matches(Candidate(place.site, (), (place.port,)), place.port):
        return True
    if not (pattern.is_op and place.op):
        return False
    name = split(str(place))
    return pattern.matches_op(name.path, place.op, name.number or 0, place.port, GROUPS)


def equal(place: Place) -> Any:
    """Return the filter that leaves one place's rows."""
    return (pc.field("site") == place.site) & (pc.field("port") == place.port) & (pc.field("slot") == place.slot)


def any_place(places: Iterable[Place]) -> Any:
    """Return the filter that leaves several places' rows: as few comparisons as there are ports, not sites."""
    sites: dict[tuple[str, str], list[str]] = {}
    for place in places:
        sites.setdefault((place.port, place.slot), []).append(place.site)
    return any_of(
        pc.field("site").isin(found) & (pc.field("port") == port) & (pc.field("slot") == slot)
        for (port, slot), found in sites.items()
    )


def any_of(tests: Iterable[Any]) -> Any:
    """Return rows that pass at least one filter."""
    return reduce(lambda a, b: a | b, tests)


def all_of(tests: Iterable[Any]) -> Any:
    """Return rows that pass every filter; None when there is none."""
    given = [test for test in tests if test is not None]
    return reduce(lambda a, b: a & b, given) if given else None


def step_filter(steps: StepSelection) -> Any:
    """Return the filter that leaves chosen steps: a number, a (start, stop) pair, a slice or a list."""
    if steps is None:
        return None
    step = pc.field("step")
    if isinstance(steps, numbers.Integral):
        return step == int(steps)
    bounds = _bounds(steps)
    if bounds is None:
        return step.isin(list(steps))  # type: ignore[arg-type]
    start, stop, stride = bounds
    tests = [None if start is None else step >= start, None if stop is None else step < stop]
    if stride > 1:
        shifted = step - (start or 0)
        tests.append(pc.equal(shifted - pc.multiply(pc.divide(shifted, stride), stride), 0))
    return all_of(tests)


def step_test(steps: StepSelection) -> Callable[[int], bool]:
    """Return the same choice as a function of a step's number."""
    if steps is None:
        return lambda step: True
    if isinstance(steps, numbers.Integral):
        chosen = int(steps)
        return lambda step: step == chosen
    bounds = _bounds(steps)
    if bounds is None:
        wanted = frozenset(steps)  # type: ignore[arg-type]
        return lambda step: step in wanted
    start, stop, stride = bounds
    first = start or 0
    return lambda step: step >= first and (stop is None or step < stop) and (step - first) % stride == 0


def _bounds(steps: Any) -> tuple[int | None, int | None, int] | None:
    if isinstance(steps, slice):
        stride = 1 if steps.step is None else steps.step
        if stride < 1 or (steps.start or 0) < 0 or (steps.stop or 0) < 0:
            raise RunError(f"steps must count upwards from 0, such as slice(100, 200), got {steps}")
        return steps.start, steps.stop, stride
    if isinstance(steps, range):
        return steps.start, steps.stop, steps.step
    if isinstance(steps, tuple) and len(steps) == 2:
        return steps[0], steps[1], 1
    return None
