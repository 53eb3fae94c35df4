"""What rules over the training context share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import NO_CONTEXT, NoData
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding, Steps

CLASSES: Final = ("cross_entropy", "nll_loss", "categorical_crossentropy", "sparse_categorical_crossentropy")
_AROUND: Final = ("computed_at", "callers")  # further lines of the user's code that an event names
REGRESSION: Final = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
BINARY: Final = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "binary_crossentropy")


def events(history: RunHistory, kind: str) -> list[TrainingEvent]:
    """Return the events of a kind; without a training context the rule cannot look."""
    if not history.events("model"):
        raise NoData(NO_CONTEXT)
    return history.events(kind)


def _check_seen(history: RunHistory, what: str) -> None:
    """Raise NoData where the context says that no model of the run can show something, as a compiled step of JAX."""
    models = events(history, "model")
    if all(what in model.data.get("unseen", ()) for model in models):
        raise NoData(f"the {what} of a compiled step cannot be seen from outside")


def totals(history: RunHistory) -> dict[str, Any]:
    """Return the counts of the whole training; empty while it goes on."""
    found = events(history, "totals")
    return found[-1].data if found else {}


def modules(history: RunHistory) -> list[dict[str, Any]]:
    """Return the modules of all models with their options."""
    _check_seen(history, "modules")
    return [module for event in events(history, "model") for module in event.data.get("modules", ())]


def cause(
    events: Sequence[TrainingEvent], message: str, advice: str, *, site: str = "", code: str = "", severity: Any = "",
    places: Sequence[str] = (), **evidence: Any,
) -> Finding:  # fmt: skip
    """Return a finding at the line of the first event that has one."""
    steps = sorted({event.step for event in events})
    when = Steps(steps[0], steps[-1], len(steps)) if steps else None
    line = code or next((event.code for event in events if event.code), "")
    around = [place for event in events[:1] for name in _AROUND for place in event.data.get(name) or ()]
    further = dict.fromkeys(place for place in (*places, *around) if place != line)
    return Finding("", severity, site, when, evidence, message, advice=advice, code=line, places=tuple(further))


def training_losses(history: RunHistory, *names: str) -> dict[str, list[TrainingEvent]]:
    """Return the loss calls of training by their line."""
    _check_seen(history, "loss")
    found: dict[str, list[TrainingEvent]] = {}
    for event in events(history, "loss"):
        if event.data.get("train") and (not names or event.name in names):
            found.setdefault(event.code, []).append(event)
    return found


def lines_of_activation(history: RunHistory, operation: str) -> list[str]:
    """Return the lines of the model that apply an activation, as a function or as a module."""
    found: list[str] = []
    for event in events(history, "model"):
        functions, lines = event.data.get("functions") or {}, event.data.get("lines") or {}
        found += functions.get(operation, ())
        found += [
            lines[m["path"]]
            for m in event.data.get("modules", ())
            if m["path"] in lines and m["type"].lower() == operation.lower()
        ]
    return list(dict.fromkeys(found))[:4]


def owner(parameter: str | None) -> str:
    """Return the module of a parameter's name.

    >>> owner("head.weight"), owner(None)
    ('head', '')
    """
    return (parameter or "").rpartition(".")[0]


def lines_of(history: RunHistory, kind: str) -> list[str]:
    """Return the lines of code of the events of a kind, each once."""
    return list(dict.fromkeys(event.code for event in events(history, kind) if event.code))


def loss_values(history: RunHistory) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the training loss over steps, whatever it is called."""
    names = [n for n in history.metrics if "loss" in n.lower() and not n.lower().startswith(("eval", "val", "test"))]
    return history.metrics[names[0]][1] if names else np.zeros(0)


def needs_not_fall(history: RunHistory) -> bool:
    """Return whether a healthy training of this kind may have a loss that does not fall.

    So it is where losses play against each other or are none of those that compare outputs with data (policy
    gradients, critics), and where the targets are a model's own answers, as in Q-learning: of a model that is called
    without gradients, in training mode, nearly as often as with them, or a varying number of times for each backward.
    """
    known = history.events("totals")
    calls = known[-1].data if known else {}
    if not calls.get("backwards"):
        return False
    kinds = {event.name for event in history.events("loss") if event.data.get("train")}
    acting = sum(model.get("train_no_grad", 0) for model in calls.get("calls", {}).values())
    episodes = len(calls.get("calls_per_backward", ())) >= 5
    return not kinds or episodes or (kinds <= set(REGRESSION) and acting >= 0.5 * calls["backwards"])


def gets_on(history: RunHistory, *, least: float = 0.2) -> bool:
    """Return whether the loss falls to less than `least` of what it began with."""
    values = loss_values(history)
    if len(values) < 8 or not np.isfinite(values).all():
        return False
    k = max(2, len(values) // 8)
    return bool(0 <= np.median(values[-k:]) < least * np.median(values[:k]))


def goes_wrong(history: RunHistory) -> bool:
    """Return whether the loss ends where it began, higher, or not finite, and ought to fall."""
    values = loss_values(history)
    if len(values) < 8 or (np.isfinite(values).all() and needs_not_fall(history)):
        return False
    if not np.isfinite(values).all():
        return True
    k = max(2, len(values) // 8)
    begin = float(np.median(values[:k]))
    if begin > 2 * values[0] > 0:  # it went up at once: what it came back to is held against what it was
        begin = float(values[0])
    return bool(np.median(values[-k:]) >= 0.9 * begin)


def jump(history: RunHistory, *, rise: float = 2.0, end: float = 0.75) -> tuple[float, float, float] | None:
    """Return the first loss, the highest of the first quarter and the last one, where steps have thrown it up at once.

    To `rise` times what it was, and it ends at `end` of that or more. None where it did not, or got on afterwards.
    """
    values = loss_values(history)
    if len(values) < 8 or not np.isfinite(values).all() or values[0] <= 0:
        return None
    first, top = float(values[0]), float(np.max(values[: max(8, len(values) // 4)]))
    last = float(np.median(values[-max(2, len(values) // 8) :]))
    return (first, top, last) if top > rise * first and last >= end * first else None


def update_ratios(history: RunHistory) -> tuple[list[TrainingEvent], list[float]]:
    """Return for each sample the median update of kernels, relative to the weight."""
    found, ratios = [], []
    for event in events(history, "parameters"):
        shapes, updates = event.data.get("shapes", []), event.data.get("update", [])
        kernels = [
            u for u, shape in zip(updates, shapes, strict=True) if len(shape) > 1 and isinstance(u, (int, float))
        ]
        kernels = [u for u in kernels if u >= 0]
        if kernels:
            found.append(event)
            ratios.append(float(np.median(kernels)))
    return found, ratios
