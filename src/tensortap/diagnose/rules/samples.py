"""Name the sample behind a finding, where the training context has ranked the samples of its step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tensortap import text
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding, Steps

_NEAR: Final = 2  # steps between the event and the finding: a loss is judged when its step is over
_LARGE: Final = 10.0


def with_sample(history: RunHistory, finding: Finding) -> Finding:
    """Return a finding with the samples of its first step, the most suspicious first, if they were ranked."""
    event = _event(history, finding)
    if event is None:
        return finding
    evidence = {**finding.evidence, "samples": event.data["rows"], "sample_is_clear": event.data["clear"]}
    if not event.data["clear"]:
        return replace(finding, evidence=evidence, message=f"{finding.message} {_nobody(event.data)}")
    first = event.data["rows"][0]
    advice = f"{_look_at(first)} {finding.advice}".strip()
    return replace(finding, evidence=evidence, message=f"{finding.message} {sentence(event.data)}", advice=advice)


def _nobody(data: dict[str, Any]) -> str:
    """Say that no sample stands out, and in what where only the inputs could be judged.

    >>> _nobody({"rows": [{"row": 3, "bad_inputs": 0, "size": 1.0, "loss": 0.5}], "count": 8})
    'No sample of its batch of 8 stands out.'
    >>> _nobody({"rows": [{"row": 3, "bad_inputs": 0, "size": 1.0}], "count": 8})
    'By its inputs no sample of its batch of 8 stands out; the loss of each is not known.'
    >>> _nobody({"rows": [{"row": 3, "bad_inputs": 0, "size": 1.0}], "count": 8, "steps_back": 1})
    'By its inputs no sample of the batch before of 8 stands out; the loss of each is not known.'
    """
    of = f"of {_batch(data)} of {data['count']}"
    if any("loss" in row or "bad_outputs" in row for row in data["rows"]):
        return f"No sample {of} stands out."
    return f"By its inputs no sample {of} stands out; the loss of each is not known."


def _batch(data: dict[str, Any]) -> str:
    return "the batch before" if data.get("steps_back") else "its batch"


def _event(history: RunHistory, finding: Finding) -> TrainingEvent | None:
    if finding.steps is None:
        return None
    step = finding.steps.first
    near = [e for e in history.events("samples") if abs(e.step - step) <= _NEAR and e.data.get("rows")]
    return min(near, key=lambda e: (not e.data["clear"], abs(e.step - step)), default=None)


def spike_of_one_sample(history: RunHistory, factor: float) -> Finding | None:
    """Return the largest jump of a loss that one sample has made, to be noted."""
    found = [e for e in history.events("samples") if e.name == "spike" and e.data.get("clear")]
    found = [e for e in found if _jump(e) > 0 and _jump(e) >= factor * abs(e.data["before"])]
    if not found:
        return None
    first = max(found, key=_jump)
    loss, before = text.number(first.data["loss"]), text.number(first.data["before"])
    evidence = {"value": first.data["loss"], "before": first.data["before"], "spikes": len(found)}
    message = f"The loss jumps from {before} to {loss} at step {first.step}."
    when = Steps(first.step, first.step, 1)
    return with_sample(history, Finding("", "info", "", when, evidence, message, code=first.code))


def outsized_sample(history: RunHistory) -> Finding | None:
    """Return the first batch in which one sample is far larger than the others, though the loss was usual."""
    found = [e for e in history.events("samples") if e.name == "outsized" and e.data.get("clear")]
    found = [e for e in found if e.data["rows"][0].get("size", 0.0) > _LARGE]
    if not found:
        return None
    first, row = found[0], found[0].data["rows"][0]
    evidence = {"size": row["size"], "batches": len(found), "samples": first.data["rows"], "sample_is_clear": True}
    when = Steps(first.step, found[-1].step, len(found))
    message = f"One sample is out of size. {sentence(first.data, 'stands out')}"
    return Finding("", "", ":input", when, evidence, message, advice=_look_at(row), code=first.code)


def _jump(event: TrainingEvent) -> float:
    loss, before = event.data.get("loss"), event.data.get("before")
    return loss - before if isinstance(loss, float) and isinstance(before, float) else 0.0


def sentence(data: dict[str, Any], did: str = "did it") -> str:
    """Say which sample it is, and why.

    >>> row = {"row": 3, "index": 17, "dataset": "Digits", "bad_inputs": 2, "size": 1.0}
    >>> sentence({"rows": [row], "count": 8, "steps_back": 0})
    'Sample 3 of its batch of 8, index 17 of Digits, did it: 2 of its input values are not finite.'
    """
    row = data["rows"][0]
    when = f"Sample {row['row']} of {_batch(data)}"
    index = f", index {row['index']} of {row['dataset']}" if "index" in row else ""
    key = f", {row['key']}" if row.get("key") else ""
    return f"{when} of {data['count']}{index}{key}, {did}: {_why(row)}."


def _why(row: dict[str, Any]) -> str:
    if row.get("bad_inputs"):
        return f"{row['bad_inputs']} of its input values are not finite"
    if row.get("size", 1.0) > _LARGE:
        return f"its values are {text.number(row['size'])} times the size of the batch's median"
    if row.get("bad_outputs"):
        return "its output is not finite"
    share, loss = row.get("share"), row.get("loss")
    if isinstance(share, float) and isinstance(loss, float):
        usual = text.number(row["usual"])
        return f"it has {text.number(100 * share)} % of the loss, {text.number(loss)} where {usual} is usual"
    return "its loss is not finite"


def _look_at(row: dict[str, Any]) -> str:
    if "index" in row:
        return f"Look at that sample: dataset[{row['index']!r}], and its label."
    return f"Look at row {row['row']} of that batch, and its label."
