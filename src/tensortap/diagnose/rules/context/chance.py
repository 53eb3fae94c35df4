"""A rule on losses of classes that stay where an answer without looking at the input would be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import rule
from tensortap.diagnose.rules.context.shared import (
    BINARY,
    CLASSES,
    cause,
    events,
    loss_values,
    training_losses,
    update_ratios,
)
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding

_MOST_COUNTED: Final = 64  # classes that an event counts one by one


@rule("loss_at_chance")
def loss_at_chance(
    history: RunHistory, *, steps: int = 50, near: float = 0.06, far: float = 2.0, labels: int = 1500
) -> Iterator[Finding]:  # fmt: skip
    """The loss stays, to the last third of the run, within `near` of what the best constant answer would give.

    Or above it, up to `far` times: what is worse has other causes. Over at least `steps` steps. A loss that steadily
    falls is on its way, unless a loader gives the same samples for the third time and the weights have moved far: then
    it may learn them by heart. Info where fewer than `labels` labels were seen, where the loss varies so much that its
    end may as well be lower, and where the whole model is frozen and only its inputs are trained, as in prompt tuning.
    """
    calls = [e for group in training_losses(history, *CLASSES, *BINARY).values() for e in group]
    values = loss_values(history)
    if len(values) < steps or not calls or len(training_losses(history)) != 1:
        return
    chance, end = _chance(calls), float(np.mean(values[-len(values) // 3 :]))
    begin = float(np.mean(values[: max(3, len(values) // 10)]))
    leaving = not _is_known_by_heart(history, len(values)) and _is_leaving(values, 0.3 * near * chance)
    if chance > 0.05 and (1 - near) * chance <= end <= far * chance and end > 0.9 * begin and not leaving:
        early = _labels_seen(calls, len(values)) < labels or _is_vague(values, near * chance)
        yield cause(calls, f"The loss ends at {text.number(end)}; answering without looking at the input would give "
                    f"{text.number(chance)}.", "Do labels belong to their inputs? Overfit one batch first.",
                    end=end, chance=chance, severity="info" if early or _trains_inputs(history) else "")  # fmt: skip


def _is_known_by_heart(history: RunHistory, steps: int, *, far: float = 0.3) -> bool:
    """Return whether samples came for the third time, and steps together were `far` of the weights or more."""
    epochs = [e.data.get("epoch") or 0 for e in events(history, "batch") if e.data.get("mode") == "train"]
    ratios = [ratio for ratio in update_ratios(history)[1] if np.isfinite(ratio)]
    moved = float(np.median(ratios)) * steps if ratios else far
    return max(epochs, default=0) >= 3 and moved >= far


def _labels_seen(calls: list[TrainingEvent], steps: int) -> float:
    """Return about how many labels were trained on: in few, many a healthy training gets nowhere yet."""
    sizes = [int(np.prod(e.data.get("target", {}).get("shape") or [1])) for e in calls]
    return float(np.median(sizes)) * steps


def _is_vague(values: np.ndarray[Any, np.dtype[np.float64]], apart: float) -> bool:
    """Return whether the mean of the last third is known less exactly than by `apart`."""
    last = values[-len(values) // 3 :]
    return bool(np.std(last) / np.sqrt(len(last)) > apart)


def _trains_inputs(history: RunHistory) -> bool:
    """Return whether every parameter of the models is frozen, and optimizers hold tensors that are in none of them."""
    models, held = events(history, "model"), events(history, "holds")
    whole = all(e.data.get("parameters") and e.data.get("frozen_count") == e.data["parameters"] for e in models)
    return whole and bool(held) and all(e.data.get("foreign") and not e.data.get("held") for e in held)


def _chance(calls: list[TrainingEvent]) -> float:
    """Return the loss of the best constant answer, from the classes of many calls together; 0 where it is not known.

    The calls are those of the later half, since a script may train for one thing and then for another.
    Few labels of many classes show less than there is: two have two classes at most. Where they are too few for a
    correction (of Miller and Madow), nothing is known.
    """
    last = max(e.step for e in calls)
    targets = [e.data.get("target", {}) for e in calls if 2 * e.step >= last]
    counts: Counter[str] = Counter()
    for target in targets:
        counts.update(target.get("counts") or {})
    if not counts:
        return _of_binary([target for target in targets if "mean" in target])
    if all(target.get("classes", 0) <= _MOST_COUNTED for target in targets):
        labels, classes = sum(counts.values()), len(counts)
        shares = np.array([n for n in counts.values() if n], np.float64) / labels
        entropy = float(-(shares * np.log(shares)).sum())
    else:
        labels = int(np.median([np.prod(target.get("shape", [0])) for target in targets]))
        classes = int(np.median([target.get("classes", 0) for target in targets]))
        entropy = float(np.median([target.get("entropy", 0.0) for target in targets]))
    return entropy + (classes - 1) / (2 * labels) if labels >= 4 * classes and entropy else 0.0


def _of_binary(targets: list[dict[str, Any]]) -> float:
    mean = float(np.mean([target["mean"] for target in targets])) if targets else 0.0
    return float(-mean * np.log(mean) - (1 - mean) * np.log(1 - mean)) if 0 < mean < 1 else 0.0


def _is_leaving(values: np.ndarray[Any, np.dtype[np.float64]], way: float, steps: int = 100) -> bool:
    """Return whether the loss falls all the time, so fast that within as many steps again it has gone its `way`."""
    later = values[len(values) // 3 :]
    x = np.arange(len(later)) - (len(later) - 1) / 2
    slope = float((x * later).sum() / (x * x).sum())
    spread = float(np.std(later - later.mean() - slope * x)) / float(np.sqrt((x * x).sum()))
    return slope < -2.5 * spread and -slope * max(len(values), steps) > way
