"""The lines of the user's code that define a model, for findings that name a place in it and no line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from tensortap.diagnose.history import RunHistory
from tensortap.finding import Finding

_INPUTS: Final = ("inputs_not_normalised", "evaluation_inputs_differ", "data_changed", "batches_repeated")
_TARGETS: Final = (
    "labels_one_class", "labels_sorted", "labels_out_of_range", "labels_imbalanced", "targets_not_normalised",
    "loss_broadcast", "output_bounded",
)  # fmt: skip
_DATA: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(_INPUTS, ("batch",)), **dict.fromkeys(_TARGETS, ("loss",)), "loss_at_chance": ("batch", "loss"),
}  # fmt: skip


def with_lines(findings: Iterable[Finding], history: RunHistory) -> list[Finding]:
    """Return findings at a module or parameter with the line that makes it."""
    found = [_with_data_lines(finding, history) for finding in findings]
    models = [event.data for event in history.events("model")]
    modules = {path: line for data in models for path, line in _lines(data, "lines").items()}
    parameters = {path: line for data in models for path, line in _lines(data, "parameter_lines").items()}
    return [f if f.code else replace(f, code=_line(f.site.partition(":")[0], modules, parameters)) for f in found]


def _with_data_lines(finding: Finding, history: RunHistory) -> Finding:
    """Add the lines that make the data, where a finding is about it."""
    of_input = finding.rule == "nonfinite" and (finding.site.startswith(":input") or _came_in(finding))
    kinds = ("batch",) if of_input else _DATA.get(finding.rule, ())
    lines = [line for kind in kinds for line in _origins(history, kind) if line != finding.code]
    if not lines:
        return finding
    return replace(finding, code=finding.code or lines[0], places=tuple(dict.fromkeys((*finding.places, *lines))))


def _came_in(finding: Finding) -> bool:
    """Return whether the cause is a sample that was not finite in the input."""
    samples = finding.evidence.get("samples") or [{}]
    return bool(finding.evidence.get("sample_is_clear") and samples[0].get("bad_inputs"))


def _origins(history: RunHistory, kind: str) -> list[str]:
    """Return the lines that make the inputs (`batch`) or the targets (`loss`) of the training."""
    found = (event.data.get("origins") for event in history.events(kind))
    return next((list(lines) for lines in found if isinstance(lines, list)), [])


def _lines(data: dict[str, object], name: str) -> dict[str, str]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _line(path: str, modules: dict[str, str], parameters: dict[str, str]) -> str:
    """Return the line of a parameter, of its module, or of a module around it."""
    if path in parameters:
        return parameters[path]
    while path:
        if path in modules:
            return modules[path]
        path = path.rpartition(".")[0]
    return ""
