"""List what happened in a training by step: learning rates, phases, checkpoints, notes, and the error that ended it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tensortap import text
from tensortap.diagnose.training import TrainingEvent, training_events
from tensortap.store import facts, queries
from tensortap.store.snapshot import Snapshot

POINTS: Final = 2000  # of a learning rate
MARKS: Final = 300
SPANS: Final = 600
JUMP: Final = 2.0  # times by which a rate must change at once to be named
# What is recorded for the rules, once or many times a step, and tells a reader of the time line nothing.
_HIDDEN: Final = frozenset(
    ("model", "mode", "batch", "loss", "backward", "holds", "rate", "scheduler", "schedule", "loop", "parameters",
     "clip", "totals", "zero_grad")
)  # fmt: skip
_RATE: Final = re.compile(r"(^|[/._-])(lr|learning_?rate)([/._-]?(0|pg0|group_?0))?$", re.IGNORECASE)


class Rate(NamedTuple):
    """A learning rate from a step on."""

    step: int
    value: float


class TimelineMark(NamedTuple):
    """Something that happened at a step."""

    step: int
    kind: str
    text: str
    code: str = ""
    rank: int = 0
    times: float = 1.0  # of a learning rate, by how much it changed

    @property
    def said(self) -> str:
        """The mark in a clause: `the learning rate rose ×100 at step 12`."""
        return f"{self.text} at step {self.step}"


class Timeline(NamedTuple):
    """The learning rate over steps, and marks in order."""

    rate: tuple[Rate, ...]
    marks: tuple[TimelineMark, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain values; of very many points evenly spread ones."""
        rate, marks = _thinned(self.rate, POINTS), _most_important(self.marks)
        return {
            "rate": {"steps": [r.step for r in rate], "values": [r.value for r in rate]},
            "marks": [mark._asdict() for mark in marks],
            "hidden": len(self.marks) - len(marks),
        }


def timeline(snapshot: Snapshot) -> Timeline:
    """Return what happened, from the events and metrics of a run."""
    events = training_events(snapshot)
    rate = tuple(_rates(events)) or tuple(_measured(snapshot))
    marks = [*jumps(rate), *_marks(events), *_end(snapshot)]
    return Timeline(rate, tuple(sorted(marks, key=lambda mark: mark.step)))


def phase_spans(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the spans of steps of each phase, if all are numbered in one sequence; of very many, the longest."""
    if len(snapshot.phases) < 2 or facts.numbered_phases(snapshot):
        return []
    of: dict[int, str] = {}
    for phase in reversed(snapshot.phases):
        of |= dict.fromkeys(snapshot.of_phase(phase).steps.tolist(), phase)
    groups = [(phase, list(steps)) for phase, steps in itertools.groupby(sorted(of), key=of.__getitem__)]
    longest = sorted(groups, key=lambda group: -len(group[1]))[:SPANS]
    spans = sorted((steps[0], steps[-1], phase) for phase, steps in longest)
    return [{"phase": phase, "from": first, "to": last} for first, last, phase in spans]


def _rates(events: Iterable[TrainingEvent]) -> Iterator[Rate]:
    """Yield the highest learning rate of the groups of the first optimizer, whenever it is told."""
    for event in events:
        if event.kind in ("optimizer", "rate") and event.rank == 0 and event.data.get("number", 1) == 1:
            known = [group.get("lr") for group in event.data.get("groups", ()) if isinstance(group, dict)]
            numbers = [float(lr) for lr in known if isinstance(lr, (int, float))]
            if numbers:
                yield Rate(max(event.step, 0), max(numbers))


def _measured(snapshot: Snapshot) -> Iterator[Rate]:
    """Yield the learning rate that the user gave as a metric."""
    table = queries.metrics(snapshot)
    names = table["name"].to_pylist()
    chosen = next((name for name in dict.fromkeys(names) if _RATE.search(name)), None)
    before = None
    for name, step, value in zip(names, table["step"].to_pylist(), table["value"].to_pylist(), strict=True):
        if name == chosen and value is not None and value != before:
            before = value
            yield Rate(step, float(value))


def jumps(rates: Sequence[Rate]) -> Iterator[TimelineMark]:
    """Yield where a learning rate changes at once by more than `JUMP` times, up from what it had settled at.

    >>> [mark.said for mark in jumps([Rate(0, 1e-3), Rate(158, 1e3)])]
    ['the learning rate rose ×1e6 at step 158']
    """
    for before, after in itertools.pairwise(rates):
        if before.value > 0 and after.value > 0:
            times = after.value / before.value
            if times >= JUMP or times <= 1 / JUMP:
                how = f"rose ×{text.number(times)}" if times > 1 else f"fell to 1/{text.number(1 / times)}"
                yield TimelineMark(after.step, "rate", f"the learning rate {how}", times=times)
        elif before.value > 0 >= after.value:
            yield TimelineMark(after.step, "rate", "the learning rate fell to 0", times=0.0)


def _marks(events: Iterable[TrainingEvent]) -> Iterator[TimelineMark]:
    for event in events:
        if event.kind in _HIDDEN or (event.kind == "optimizer" and event.step <= 0):
            continue
        yield TimelineMark(max(event.step, 0), event.kind, _words(event), event.code, event.rank)


def _words(event: TrainingEvent) -> str:
    """Return an event in a few words."""
    data = event.data
    if event.kind == "epoch":
        return f"epoch {data['epoch']}" if "epoch" in data else "an epoch begins"
    if event.kind == "checkpoint":
        return f"checkpoint {event.name}".strip()
    if event.kind == "optimizer":
        return f"a new {event.name}"
    if event.kind == "failed":
        return f"the training context ended: {event.name}"
    said = next((str(data[name]) for name in ("text", "note", "message") if data.get(name)), event.name)
    return text.printable(f"{event.kind.replace('_', ' ')} {said}".strip()[:200])


def _end(snapshot: Snapshot) -> Iterator[TimelineMark]:
    """Yield the error that ended the run, or that its process is gone, at its last step."""
    last = int(snapshot.steps[-1]) if len(snapshot.steps) else 0
    if ended_by := facts.ended_by(snapshot):
        yield TimelineMark(last, "exception", f"ended by {ended_by}")
    elif snapshot.state == "crashed":
        yield TimelineMark(last, "exception", "the process ended without closing the run")


def _thinned(rates: Sequence[Rate], most: int) -> list[Rate]:
    if len(rates) <= most:
        return list(rates)
    return [rates[i] for i in np.unique(np.linspace(0, len(rates) - 1, most).astype(int))]


def _most_important(marks: Sequence[TimelineMark]) -> list[TimelineMark]:
    """Return marks that fit the screen: errors, jumps and notes before checkpoints, checkpoints before epochs."""
    rank = {"epoch": 2, "checkpoint": 1}
    chosen = sorted(range(len(marks)), key=lambda i: (rank.get(marks[i].kind, 0), i))[:MARKS]
    return [marks[i] for i in sorted(chosen)]
