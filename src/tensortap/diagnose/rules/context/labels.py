"""Rules on labels: classes, their range and order, and padding among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import rule
from tensortap.diagnose.rules.context.shared import (
    BINARY,
    CLASSES,
    REGRESSION,
    cause,
    events,
    lines_of,
    modules,
    owner,
    training_losses,
)
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding

_OF_LAYERS: Final = ("Addmm", "Mm", "Linear", "Convolution", "Sigmoid", "Tanh", "Relu")  # what a model's output ends in


@rule("labels_one_class", severity="error")
def labels_one_class(history: RunHistory, *, calls: int = 3, least: int = 8) -> Iterator[Finding]:
    """All targets that were seen are of one class.

    At least `calls` calls, at least `least` times.
    """
    yield from _all_the_same(history, calls, least)
    found = [e for group in training_losses(history, *CLASSES).values() for e in group]
    known = [e for e in found if e.data.get("target", {}).get("classes") and not _compares(e.data)]
    if len(known) >= calls and all(e.data["target"]["classes"] == 1 for e in known):
        values = {e.data["target"]["most"] for e in known}
        size = sum(e.data["target"]["counts"][str(e.data["target"]["most"])] for e in known)
        if len(values) == 1 and size >= least * calls:
            yield cause(known, f"All {size} labels that were looked at are {values.pop()}.",
                        "Look at how labels are read; check the loss's target.")  # fmt: skip


def _all_the_same(history: RunHistory, calls: int, least: int) -> Iterator[Finding]:
    """Judge the targets of binary cross entropies and of regressions, all of them together.

    A GAN's are ones here and zeros there. What is computed from outputs, as the residual of an equation, may have one
    target.
    """
    found = [e for group in training_losses(history, *BINARY, *REGRESSION).values() for e in group]
    known = [e for e in found if _is_judged(e)]
    values = {value for e in known for value in (e.data["target"]["min"], e.data["target"]["max"])}
    size = sum(int(np.prod(e.data["target"]["shape"])) for e in known)
    if len(known) >= calls and len(known) == len(found) and len(values) == 1 and size >= least * calls:
        yield cause(known, f"All {size} targets that were looked at are {text.number(values.pop())}.",
                    "Look at how labels are read; check the loss's target.")  # fmt: skip


def _is_judged(event: TrainingEvent) -> bool:
    target, operations = event.data.get("target", {}), event.data.get("operations") or [""]
    if "min" not in target or "max" not in target:
        return False
    return bool(target.get("binary")) if event.name in BINARY else str(operations[0]) in _OF_LAYERS


def _compares(data: dict[str, Any]) -> bool:
    """Return whether the logits are similarities and the first one is right, as in contrastive losses."""
    operations = data.get("operations") or [""]
    return str(operations[0]) in ("Div", "Mul", "Mm", "Bmm", "Sub", "Neg", "Cat")


@rule("labels_sorted")
def labels_sorted(history: RunHistory, *, share: float = 0.9, least: int = 8) -> Iterator[Finding]:
    """Nearly every batch holds one class, another one later: the data is sorted and not shuffled.

    In a share `share` of the cases, at least `least` times.
    """
    for calls in training_losses(history, *CLASSES).values():
        known = [e for e in calls if sum(e.data.get("target", {}).get("counts", {}).values()) >= least]
        pure = [e for e in known if e.data["target"]["share"] >= share]
        if len(known) >= 4 and len(pure) >= 0.8 * len(known) and len({e.data["target"]["most"] for e in pure}) > 1:
            epochs = events(history, "epoch")
            line = next((e.data.get("made_at") or e.code for e in epochs), "")
            if pure[0].data.get("keras"):
                line = next(iter(lines_of(history, "batch")), "")
            yield cause(pure, "Batches hold one class each: the data is sorted by class and not shuffled.",
                        "Shuffle: DataLoader(…, shuffle=True).", code=line)  # fmt: skip


@rule("validation_classes_unseen")
def validation_classes_unseen(history: RunHistory, *, share: float = 0.5) -> Iterator[Finding]:
    """More than `share` of the validation data are of classes that training never sees: the data was split in order."""
    classes = training_losses(history, *CLASSES, *BINARY)
    wrong = [e for e in events(history, "validation") if e.data.get("unseen", 0.0) > share]
    if wrong and classes:
        said = f"{text.percent(wrong[0].data['unseen'], 1)} of the validation data are of classes that are not among "
        yield cause(wrong, said + "those of training: the data is sorted, and was split in its order.",
                    "Shuffle before the data is split; validation_split takes the last samples.",
                    unseen=wrong[0].data["unseen"])  # fmt: skip


@rule("padding_in_loss")
def padding_in_loss(history: RunHistory, *, share: float = 0.3) -> Iterator[Finding]:
    """Padding is among the targets: more than `share` of them are the embedding's padding index."""
    tables = [m for m in modules(history) if m.get("padding_idx") is not None]
    for calls in training_losses(history, *CLASSES).values():
        padding = {m["padding_idx"] for m in tables if _are_tokens(calls[0].data, m.get("num_embeddings"))}
        parts = [(e, _share_of(e.data.get("target", {}), padding)) for e in calls]
        wrong = [(event, part) for event, part in parts if part > share]
        if padding and wrong and len(wrong) > len(calls) / 2:
            part = float(np.mean([p for _, p in wrong]))
            yield cause([e for e, _ in wrong], f"{text.percent(part, 1)} of the targets are padding, and count in the "
                        "loss.", f"Give the loss ignore_index={min(padding)}, or mask it.", share=part)  # fmt: skip


def _are_tokens(data: dict[str, Any], tokens: int | None) -> bool:
    """Return whether classes are those of a table of embeddings; other classes have a number 0 that is no padding."""
    shape = data.get("input", {}).get("shape") or []
    return tokens is None or (len(shape) > 1 and tokens in (shape[1], shape[-1]))


def _share_of(target: dict[str, Any], values: set[int]) -> float:
    counts = target.get("counts", {})
    total: int = sum(counts.values())
    return float(sum(n for c, n in counts.items() if int(c) in values) / max(total, 1))


@rule("labels_out_of_range", severity="error")
def labels_out_of_range(history: RunHistory, *, margin: float = 0.4) -> Iterator[Finding]:
    """Targets of a binary cross entropy lie outside 0 to 1 by `margin`: there are more classes than outputs."""
    for calls in training_losses(history, *BINARY).values():
        known = [(e, e.data["target"]) for e in calls if "min" in e.data.get("target", {})]
        wrong = [(e, t) for e, t in known if t["min"] < -margin or t["max"] > 1 + margin]
        if wrong:
            low, high = min(t["min"] for _, t in wrong), max(t["max"] for _, t in wrong)
            said = f"Targets range from {text.number(low)} to {text.number(high)}; this loss wants 0 to 1."
            yield cause([e for e, _ in wrong], said, "For several classes give each an output, and use cross_entropy.",
                        site=owner(wrong[0][0].data.get("produced_by")), low=low, high=high)  # fmt: skip


@rule("labels_imbalanced")
def labels_imbalanced(history: RunHistory, *, share: float = 0.98, least: int = 200) -> Iterator[Finding]:
    """Nearly all labels are of one class, a share `share` of `least` labels or more, and no weight makes up for it."""
    for calls in training_losses(history, *CLASSES).values():
        flat = [e for e in calls if "weight" not in e.data and _counts(e.data.get("target", {}))]
        counts = [_counts(e.data["target"]) for e in flat if len(e.data["target"]["shape"]) == 1 or e.data.get("keras")]
        total = {c: sum(known.get(c, 0) for known in counts) for known in counts for c in known}
        every = sum(total.values())
        if len(total) > 1 and every >= least and max(total.values()) >= share * every:
            part = max(total.values()) / every
            yield cause(flat, f"{text.percent(part, 1)} of {every} labels are of one class.",
                        "Weigh the classes in the loss (weight=…), or sample them evenly.", share=part)  # fmt: skip


def _counts(target: dict[str, Any]) -> dict[str, int]:
    return dict(target.get("counts") or {})
