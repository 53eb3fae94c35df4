"""Tell what happened in a run: what it is, how its metrics went, what is wrong, the earliest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tensortap.diagnose.check import findings_in
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import as_rules
from tensortap.finding import Finding, Findings
from tensortap.store.facts import split_counts
from tensortap.store.queries import metrics
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot
from tensortap.text import counted, number, printable
from tensortap.view.api.headline import grouped, headline
from tensortap.view.api.timeline import timeline
from tensortap.view.terminal.overview import about

_PLACES: Final = 4
_METRICS: Final = 8
_LISTED: Final = 20  # places, lines and consequences of one item of an answer


def story(run: Run, found: Findings | None = None) -> str:
    """Return a run's story as text: a line about the run, its metrics, and each thing that is wrong with its places."""

    def read(snapshot: Snapshot) -> str:
        asked = findings_in(RunHistory(run, snapshot=snapshot), as_rules(None)) if found is None else found
        return _story(snapshot, asked)

    return run.snapshots.read(read, whole=True)


def _story(snapshot: Snapshot, found: Findings) -> str:
    said = about(snapshot)
    first = headline(found, timeline(snapshot), said["model"])
    opening = [_title(snapshot, said), *([first] if first else [])]
    return "\n".join([*opening, *_metrics(snapshot), *_counts(said), "", *_wrong(found)])


def _title(snapshot: Snapshot, said: dict[str, Any]) -> str:
    ended = f", ended by {said['ended_by']}" if said.get("ended_by") else ""
    parts = [
        str(said["model"]), f"{said['state']}{ended}", counted(len(snapshot.steps), "step"),
        counted(len(snapshot.places), "site"),
        counted(len(said["ranks"]), "rank") if len(said["ranks"]) > 1 else "",
    ]  # fmt: skip
    return printable(f"{said['path']}: " + ", ".join(part for part in parts if part))


def _metrics(snapshot: Snapshot) -> Iterator[str]:
    table = metrics(snapshot)
    series: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in zip(*(table[column].to_pylist() for column in ("name", "step", "value")), strict=True):
        if value is not None:
            series.setdefault(name, []).append((step, value))
    for name, points in list(series.items())[:_METRICS]:
        points.sort()
        yield printable(f"{name}: {_course(points)}")
    if len(series) > _METRICS:
        yield f"and {len(series) - _METRICS} more metrics"


def _course(points: list[tuple[int, float]]) -> str:
    (first, begin), (last, end) = points[0], points[-1]
    bad = next((step for step, value in points if value - value != 0), None)
    lost = f"; not finite from step {bad}" if bad is not None else ""
    if first == last:
        return f"{number(begin)} at step {first}{lost}"
    return f"{number(begin)} at step {first}, {number(end)} at step {last}{lost}"


def _counts(said: dict[str, Any]) -> Iterator[str]:
    if counts := split_counts(said["counts"])[0]:
        yield printable("not recorded or not readable: " + ", ".join(f"{name} {n}" for name, n in counts.items()))


def _wrong(found: Findings) -> Iterator[str]:
    if not len(found):
        yield found.summary()
    for place, group in enumerate(grouped(found), 1):
        yield from _group(place, group)


def _group(place: int, group: list[Finding]) -> Iterator[str]:
    first = group[0]
    where = (f" at {first.site}" if first.site else "") + (f" ({first.code})" if first.code else "")
    when = f", {first.steps}" if first.steps else ""
    yield printable(f"{place}. {first.severity}: {first.rule}{where}{when}")
    yield printable(f"   {first.message}")
    others = _other_places(first, group)
    if others:
        more = f" and {len(others) - _PLACES} more" if len(others) > _PLACES else ""
        yield printable(f"   The same at {', '.join(others[:_PLACES])}{more}.")
    if first.advice:
        yield printable(f"   Change: {first.advice}")
    follows = [other for finding in group for other in finding.consequences]
    for other in follows[:_PLACES]:
        yield printable(f"   Hence {other.rule}{f' at {other.site}' if other.site else ''}: {other.message}")
    if len(follows) > _PLACES:
        yield f"   and {len(follows) - _PLACES} more that follow from it"


def _other_places(first: Finding, group: list[Finding]) -> list[str]:
    """Return where else the same was found, each once."""
    own = {first.site, first.code, ""}
    found = [place for finding in group for place in (finding.site, finding.code, *finding.places)]
    return [place for place in dict.fromkeys(found) if place not in own]


def plain_causes(found: Findings) -> list[dict[str, Any]]:
    """Return the same as plain values: one item for each cause, with its places, lines and consequences."""
    return [_item(group) for group in grouped(found)]


def _item(group: list[Finding]) -> dict[str, Any]:
    places = [*map(_place, group), *(place for finding in group for place in finding.places)]
    lines = list(dict.fromkeys(finding.code for finding in group if finding.code))
    follows = [f"{other.rule} at {_place(other)}" for finding in group for other in finding.consequences]
    return {
        "severity": group[0].severity, "rule": group[0].rule, "places": _few(places),
        "message": group[0].message, "change": group[0].advice, "lines": _few(lines), "follows": _few(follows),
    }  # fmt: skip


def _few(names: list[str]) -> list[str]:
    """Return the first of very many names, and how many more there are."""
    more = len(names) - _LISTED
    return names if more <= 0 else [*names[:_LISTED], f"and {more} more"]


def _place(finding: Finding) -> str:
    return f"{finding.site or 'the run'}{f' ({finding.steps})' if finding.steps else ''}"
