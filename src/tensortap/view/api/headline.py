"""Say in one sentence what went wrong in a run, and put its findings together by cause, the earliest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from tensortap import text
from tensortap.finding import Finding
from tensortap.view.api.timeline import Timeline, TimelineMark

_WORST: Final = {severity: at for at, severity in enumerate(("error", "warning", "info"))}
_LATEST: Final = 1 << 62
_CLAUSES: Final = 3  # of one sentence
_TOLD: Final = 10.0  # times by which a learning rate must jump to be part of the sentence
_PLACES: Final = 200


def grouped(found: Iterable[Finding]) -> list[list[Finding]]:
    """Return findings by severity and rule, the worst first, and within a severity the earliest first."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in found:
        groups.setdefault((finding.severity, finding.rule, finding.code), []).append(finding)
    ordered = (sorted(group, key=first_step) for group in groups.values())
    return sorted(ordered, key=lambda group: (_WORST.get(group[0].severity, 1), first_step(group[0])))


def first_step(finding: Finding) -> int:
    """Return the step a finding begins at; without one it comes last."""
    return finding.steps.first if finding.steps else _LATEST


def places_of(group: Sequence[Finding]) -> list[str]:
    """Return every place of the findings of one group, the first of each first."""
    return list(dict.fromkeys(place for one in group for place in (one.site, *one.places) if place))


def groups_as_json(found: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return one item for each cause: its first finding, with all places and steps of the group."""
    return [_as_json(group) for group in grouped(found)]


def _as_json(group: Sequence[Finding]) -> dict[str, Any]:
    places = places_of(group)
    known = [one.steps for one in group if one.steps]
    steps = None
    if known:
        steps = {"first": min(s.first for s in known), "last": max(s.last for s in known)}
    follows = [other for one in group for other in one.consequences]
    return group[0].as_json() | {
        "places": places[:_PLACES], "place_count": len(places), "steps": steps,
        "consequences": [_as_json(other) for other in grouped(follows)],
    }  # fmt: skip


def headline(found: Iterable[Finding], happened: Timeline, model: str = "") -> str:
    """Return what went wrong in one sentence, in the order in which it happened; empty when nothing did.

    `model` is the class of the root, which has no path of its own.
    """
    groups = [group for group in grouped(found) if group[0].severity != "info"]
    told = [group for group in groups if group[0].severity == groups[0][0].severity][:_CLAUSES]
    for group in groups[:1]:  # what the first cause led to belongs to its story
        told = [*told, *grouped(group[0].consequences)[:1]]
    clauses = [(first_step(group[0]), _clause(group, model)) for group in told]
    last = max((step for step, _ in clauses if step < _LATEST), default=-1)
    clauses += [(mark.step, mark.said) for mark in _worth_a_clause(happened, last)]
    ordered = sorted(clauses, key=lambda clause: clause[0] if clause[0] < _LATEST else -1)
    return text.printable("; ".join(clause for _, clause in ordered))


def _worth_a_clause(happened: Timeline, last: int) -> Iterator[TimelineMark]:
    """Yield jumps of the learning rate up to the last finding, the largest, and the error that ended the run."""
    sudden = [mark for mark in happened.marks if mark.kind == "rate" and mark.step <= last]
    rises = [mark for mark in sudden if mark.times >= _TOLD]
    if rises:
        yield max(rises, key=lambda mark: mark.times)
    yield from (mark for mark in happened.marks if mark.kind == "exception")


def _clause(group: Sequence[Finding], model: str) -> str:
    """Return a group in a few words: `NaN from step 159, first in layers.0.norm1 (19 places)`."""
    one, places = group[0], places_of(group)
    step = first_step(one)
    if one.rule == "nonfinite":
        when = "" if step == _LATEST else f" from step {step}"
        return f"{_kind(one)}{when}, first in {_name(one.site, model)}"
    more = f" and {text.counted(len(places) - 1, 'other place')}" if len(places) > 1 else ""
    where = f" in {_name(one.site, model)}{more}" if one.site and not one.site.startswith("metric ") else ""
    when = f" from step {step}" if 0 < step < _LATEST else ""
    return f"{one.rule.replace('_', ' ')}{where}{when}"


def _kind(finding: Finding) -> str:
    return "NaN" if finding.evidence.get("nan") or "nan" in finding.message.lower() else "Inf"


def _name(site: str, model: str) -> str:
    return f"{model if site.startswith(':') else ''}{site}".removesuffix(":output") or "the model's output"
