"""Rule on NaN and Inf: where they came from first, and how far they spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc

from tensortap import text
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import NoData, rule
from tensortap.diagnose.rules.samples import with_sample
from tensortap.finding import Finding, Steps
from tensortap.select.ports import FORWARD_PORTS, MEMBER_PORTS
from tensortap.store.queries import metrics
from tensortap.types import Place

_LIGHT: Final = (
    "step",
    "rank",
    "seq",
    "time",
    "site",
    "port",
    "slot",
    "op",
    "numel",
    "nan",
    "posinf",
    "neginf",
    "dtype",
)
_LOOKBACK: Final = " (tt.watch(..., lookback=5) keeps it)"
_CAUSES: Final = "usual causes are log or division of 0, overflow in half precision, and too high a learning rate."
ADVICE: Final = (
    f"Look at what went into this site one step earlier{_LOOKBACK}; with on_nonfinite='record' the operation that made "
    f"it is named; {_CAUSES}"
)
_NAMED: Final = f"Look at what went into it, one step earlier too{_LOOKBACK}; {_CAUSES}"

_SAID: Final = ("why ", "line ", "next ")  # of an origin's lines; the others are columns of numbers
_CAME_IN: Final = "the batch was not finite when it came in"  # as an origin says it
GIVEN: Final = "It came in with the batch: look at how the data is read, scaled and augmented."


@rule("nonfinite", severity="error")
def nonfinite(history: RunHistory) -> Iterator[Finding]:
    """NaN or Inf in a tensor or metric; the first by step and order of execution, on whichever rank, leads.

    A batch that was not finite when it came in leads before what it spoilt. Tensors that hold −Inf and nothing worse at
    every step, as attention masks do, are only noted.
    """
    events, masks = _events(history)
    several = len(history.snapshot.ranks) > 1
    if events:
        found = _with_origin(history, _lead(events, several))
        yield with_sample(history, _with_labels(history, _with_earlier_step(history, found)))
    elif history.phase is not None and (evaluated := _events(history.of_phase("eval"))[0]):
        yield _lead(evaluated, several, " of evaluation; no step of training has any")
    elif bad := _bad_metrics(history):
        yield with_sample(history, bad)
    if masks and not events:
        yield _mask_note(history, masks)
    if not history.places and not history.metrics:
        raise NoData("nothing was recorded")


def _with_earlier_step(history: RunHistory, finding: Finding) -> Finding:
    """Name the step before, where the run holds it, instead of advising to keep it."""
    if finding.steps is None or _LOOKBACK not in finding.advice:
        return finding
    before = finding.steps.first - 1
    if not history.table(steps=[before], columns=["step"]).num_rows:
        return finding
    return replace(finding, advice=finding.advice.replace(_LOOKBACK, f" (step {before}, which the run holds)"))


def _with_labels(history: RunHistory, finding: Finding) -> Finding:
    """Name the labels that `tap.span(...)` gave to the step: which request it was."""
    if finding.steps is None:
        return finding
    rows = metrics(history.snapshot).filter(pc.field("step") == finding.steps.first).to_pylist()
    labels = {row["name"]: row["text"] for row in rows if row["text"] is not None}
    if not labels:
        return finding
    said = ", ".join(f"{name} {value}" for name, value in labels.items())
    evidence = {**finding.evidence, "labels": labels}
    return replace(finding, evidence=evidence, message=f"{finding.message} That step is {said}.")


def _with_origin(history: RunHistory, finding: Finding) -> Finding:
    """Add the operation that `on_nonfinite` named in the step of the finding, where it was asked for."""
    said = [str(state.get("details", {}).get("nonfinite", "")) for state in history.snapshot.rank_states]
    first = f"step {finding.steps.first} is not finite" if finding.steps is not None else ""
    origin = next((words.partition(": ")[2] for words in said if first and words.startswith(first)), "")
    if not origin:
        return finding
    lines = [line.strip() for line in origin.splitlines() if line.strip()]
    evidence = {**finding.evidence, "origin": lines}
    told = [lines[0], *(line.partition(" ")[2].strip() for line in lines[1:] if line.startswith(_SAID))]
    came_in = _CAME_IN in told
    message = f"{finding.message} Its origin: {_CAME_IN if came_in else '; '.join(told)}."
    return replace(finding, evidence=evidence, message=message, advice=GIVEN if came_in else _NAMED)


def _events(history: RunHistory) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the rows with values that are not finite, and the sites that are masks, which are left out of them."""
    rows = _bad_rows(history)
    masks = _masks(history, rows)
    return [row for row in rows if _name(row) not in masks], masks


def _bad_rows(history: RunHistory) -> list[dict[str, Any]]:
    bad = (pc.field("nan") > 0) | (pc.field("posinf") > 0) | (pc.field("neginf") > 0)
    return list(history.table(columns=list(_LIGHT), where=bad).to_pylist())


def _masks(history: RunHistory, rows: list[dict[str, Any]]) -> set[str]:
    """Sites that hold −Inf, and nothing worse, at every step; at any, where nothing worse ever came of it."""
    names = {_name(row) for row in rows} - {_name(row) for row in rows if row["nan"] or row["posinf"]}
    worse = any(row["nan"] or row["posinf"] for row in rows) or _bad_metrics(history) is not None
    if not worse and history.metrics:
        return names
    ports = {row["port"] for row in rows if _name(row) in names}
    sites = [site for port in ports for site in history.sites(port, duplicates=True)]
    return {str(site) for site in sites if str(site) in names and np.all(site["neginf"] > 0)}


def _name(row: dict[str, Any]) -> str:
    return str(Place(row["site"], row["port"], row["slot"]))


def _when(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return a sort key: what came first, on any rank. A reduced gradient is bad on every rank, its cause is not."""
    return (
        row["step"],
        row["port"] not in FORWARD_PORTS,
        row["port"] in MEMBER_PORTS,
        row["time"],
        row["rank"],
        row["seq"],
    )


def _lead(events: list[dict[str, Any]], several: bool, where: str = "") -> Finding:
    first = min(events, key=_when if several else lambda row: (row["step"], row["seq"]))
    first = _given(first, events)
    others = list(dict.fromkeys(name for row in events if (name := _name(row)) != _name(first)))
    steps = sorted({row["step"] for row in events})
    what = " and ".join(
        f"{text.percent(count, first['numel'])} {word}"
        for word, count in (("NaN", first["nan"]), ("Inf", first["posinf"] + first["neginf"]))
        if count
    )
    rank = f" on rank {first['rank']}" if several or first["rank"] else ""
    spread = f"; spread to {len(others)} other site{'s' * (len(others) > 1)} by step {steps[-1]}" if others else ""
    evidence = {name: first[name] for name in ("step", "rank", "seq", "numel", "nan", "posinf", "neginf", "dtype")}
    evidence |= {"spread": len(others), "to": others[:8]}
    return Finding(
        "", "error", _name(first), Steps(steps[0], steps[-1], len(steps)), evidence,
        f"{what} of {first['numel']} elements, first at step {first['step']}{rank}{spread}{where}.",
        GIVEN if first["port"] == "input" and not first["site"] else ADVICE,
    )  # fmt: skip


def _given(first: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the outermost bad input around the first site: a module's input is recorded after its inside."""
    path = first["site"]
    around = [
        row
        for row in events
        if (row["step"], row["rank"], row["port"]) == (first["step"], first["rank"], "input")
        and (not row["site"] or path == row["site"] or path.startswith(f"{row['site']}."))
    ]
    forward = first["port"] in FORWARD_PORTS
    return min(around, key=lambda row: len(row["site"])) if around and forward else first


def _bad_metrics(history: RunHistory) -> Finding | None:
    for name, (steps, values) in history.metrics.items():
        bad = ~np.isfinite(values)
        if bad.any():
            when = Steps(int(steps[bad][0]), int(steps[bad][-1]), int(bad.sum()))
            message = f"The metric {name} is {values[bad][0]:g} first at step {when.first}; no recorded tensor is."
            return Finding("", "error", f"metric {name}", when, {"value": float(values[bad][0])}, message, ADVICE)
    return None


def _mask_note(history: RunHistory, masks: set[str]) -> Finding:
    lead = next(str(place) for place in history.places if str(place) in masks)
    message = f"{len(masks)} site{'s hold' if len(masks) > 1 else ' holds'} −Inf, and nothing worse, at every step."
    advice = "Attention masks look like this; if it is none, look for a log of 0."
    return Finding("", "info", lead, None, {"sites": len(masks)}, message, advice)
