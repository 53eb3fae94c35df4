"""Rules on calls of losses: whether output, loss and target fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import rule
from tensortap.diagnose.rules.context.shared import cause, events, goes_wrong, loss_values, modules, owner
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding

_REGRESSION: Final = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_BOUNDS: Final = {"Sigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Softmax": (0.0, 1.0), "Relu": (0.0, np.inf)}


def _training(history: RunHistory, *names: str) -> dict[str, list[TrainingEvent]]:
    """Return the loss calls of training by their line."""
    found: dict[str, list[TrainingEvent]] = {}
    for event in events(history, "loss"):
        if event.data.get("train") and (not names or event.name in names):
            found.setdefault(event.code, []).append(event)
    return found


def _last_operation(event: TrainingEvent) -> str:
    operations = event.data.get("operations") or [""]
    return str(operations[0])


@rule("activation_loss_mismatch", severity="error")
def activation_loss_mismatch(history: RunHistory) -> Iterator[Finding]:
    """The last activation and the loss do not fit: softmax twice, sigmoid twice, logits where probabilities belong."""
    for calls in _training(history).values():
        said = [_mismatch(event) for event in calls]
        wrong = [event for event, why in zip(calls, said, strict=True) if why]
        if wrong and len(wrong) > len(calls) / 2:
            what, advice = next(why for why in said if why)
            first = wrong[0]
            yield cause(wrong, what, advice, site=owner(first.data.get("produced_by")), loss=first.name,
                        operations=first.data.get("operations"))  # fmt: skip


def _mismatch(event: TrainingEvent) -> tuple[str, str] | None:
    data, last = event.data, _last_operation(event)
    given, target = data.get("input", {}), data.get("target", {})
    if not data.get("requires_grad"):
        return None
    if event.name == "cross_entropy":
        return _of_cross_entropy(given, target, last)
    if event.name == "nll_loss" and len(given.get("shape", ())) > 1 and 1 not in given.get("exp_sums_to_one", ()):
        wrong_axis = any(axis != 1 for _, axis, _ in data.get("softmax", ()))
        if given.get("shape", [0, 2])[1] > 1 and not wrong_axis:
            return ("nll_loss wants log-probabilities, and its input is none: exp of it does not sum to one.",
                    "Use cross_entropy on the logits, or log_softmax(…, dim=1) before nll_loss.")  # fmt: skip
    if event.name == "kl_div" and given.get("max", -1.0) > 1e-3:
        return ("kl_div wants log-probabilities, and its input has positive values.",
                "Give it log_softmax(…), not softmax or logits.")  # fmt: skip
    if event.name == "binary_cross_entropy_with_logits" and last in ("Sigmoid", "Softmax", "Relu", "LogSigmoid"):
        return (f"{last.lower()} is applied before binary_cross_entropy_with_logits, which applies a sigmoid itself.",
                f"Remove the {last.lower()} from the output, or use binary_cross_entropy.")  # fmt: skip
    if event.name == "binary_cross_entropy" and last == "Softmax" and _several_labels(target):
        return ("softmax makes the outputs compete, but samples have several labels or none.",
                "Use a sigmoid for each label (BCEWithLogitsLoss on the logits).")  # fmt: skip
    return None


def _of_cross_entropy(given: dict[str, Any], target: dict[str, Any], last: str) -> tuple[str, str] | None:
    if last in ("Softmax", "Sigmoid", "Relu", "Tanh") or (1 in given.get("sums_to_one", ()) and not last):
        name = last.lower() or "softmax"
        return (f"{name} is applied before cross_entropy, which applies log_softmax itself: the loss cannot become "
                "small and gradients shrink.", f"Return logits: remove the {name} from the output.")  # fmt: skip
    if target.get("dtype", "").startswith(("float", "bfloat")) and target.get("row_sums", [1, 1])[1] > 1.5:
        return ("cross_entropy lets classes compete, but samples have several labels.",
                "Use binary_cross_entropy_with_logits.")  # fmt: skip
    return None


def _several_labels(target: dict[str, Any]) -> bool:
    low, high = target.get("row_sums", (1.0, 1.0))
    return bool(target.get("binary")) and (low < 0.5 or high > 1.5)


@rule("softmax_axis", severity="error")
def softmax_axis(history: RunHistory) -> Iterator[Finding]:
    """A softmax before the loss runs over the batch, so that samples compete instead of classes."""
    for calls in _training(history).values():
        wrong = [e for e in calls if any(axis == 0 and axes > 1 for _, axis, axes in e.data.get("softmax", ()))]
        if wrong:
            yield cause(wrong, "The softmax before the loss runs over axis 0, the batch: its samples compete.",
                        "Use dim=1 (or dim=-1), the axis of classes.",
                        site=owner(wrong[0].data.get("produced_by")))  # fmt: skip


@rule("constant_output", severity="error")
def constant_output(history: RunHistory) -> Iterator[Finding]:
    """A softmax over one output is always 1, and cross_entropy over one class always 0."""
    for calls in _training(history).values():
        one = [e for e in calls if e.data.get("input", {}).get("shape", [0])[-1:] == [1]]
        soft = [e for e in one if any(axis == axes - 1 for _, axis, axes in e.data.get("softmax", ()))]
        single = [e for e in one if e.name == "cross_entropy" and len(e.data["input"]["shape"]) == 2]
        if wrong := soft or single:
            yield cause(wrong, "There is one output, and a softmax over one output is always 1: nothing can be learnt.",
                        "Use a sigmoid (BCEWithLogitsLoss on the logit), or two outputs.",
                        site=owner(wrong[0].data.get("produced_by")))  # fmt: skip


@rule("output_bounded", severity="error")
def output_bounded(history: RunHistory, *, margin: float = 0.1) -> Iterator[Finding]:
    """The output's activation cannot reach the targets: they leave its range by `margin` of their own."""
    for calls in _training(history, *_REGRESSION).values():
        last = _last_operation(calls[0])
        known = [e.data["target"] for e in calls if "min" in e.data.get("target", {})]
        if last not in _BOUNDS or not known:
            continue
        low, high = min(t["min"] for t in known), max(t["max"] for t in known)
        bottom, top = _BOUNDS[last]
        slack = margin * max(high - low, 1e-12)
        if low < bottom - slack or high > top + slack:
            yield cause(calls, f"The output ends in {last.lower()}, which gives {text.number(bottom)} to "
                        f"{text.number(top)}; targets range from {text.number(low)} to {text.number(high)}.",
                        "End in a linear layer, or scale the targets.", site=owner(calls[0].data.get("produced_by")),
                        low=low, high=high)  # fmt: skip


@rule("loss_broadcast", severity="error")
def loss_broadcast(history: RunHistory) -> Iterator[Finding]:
    """Output and target have shapes that broadcast, so that every output meets every target."""
    for calls in _training(history, *_REGRESSION).values():
        wrong = [e for e in calls if _differ(e.data.get("input", {}), e.data.get("target", {}))]
        if wrong:
            shapes = [wrong[0].data[name]["shape"] for name in ("input", "target")]
            yield cause(wrong, f"{wrong[0].name} broadcasts {shapes[0]} against {shapes[1]}.",
                        "Give both one shape: target.unsqueeze(1), or output.squeeze(1).", shapes=shapes)  # fmt: skip
    by_hand = [e for e in events(history, "backward") if any(map(_pairwise, e.data.get("broadcasts", ())))]
    if by_hand:
        found = next(b for b in by_hand[0].data["broadcasts"] if _pairwise(b))
        line = next((e.code for e in history.events("loss") if e.data.get("train")), "") or by_hand[0].code
        yield cause(by_hand, f"The loss is computed on {found['result']}, although the output is {found['inputs'][0]}: "
                    "every output meets every target.", "Give output and target the same shape before subtracting.",
                    code=by_hand[0].data.get("made_at") or line, shapes=found)  # fmt: skip


def _differ(given: dict[str, Any], target: dict[str, Any]) -> bool:
    a, b = given.get("shape"), target.get("shape")
    return a is not None and b is not None and a != b and int(np.prod(a)) > 1 and int(np.prod(b)) > 1


def _pairwise(broadcast: dict[str, Any]) -> bool:
    result, inputs = broadcast["result"], broadcast["inputs"]
    return (broadcast["op"] == "Sub" and len(inputs) == 1 and len(result) == 2 and result[0] == result[1] > 1
            and inputs[0] in ([result[0], 1], [result[0]]))  # fmt: skip


@rule("loss_negated", severity="error")
def loss_negated(history: RunHistory) -> Iterator[Finding]:
    """The optimizer minimises the negative of a loss."""
    wrong = [event for event in events(history, "backward") if event.data.get("negated")]
    if wrong and len(wrong) > len(events(history, "backward")) / 2:
        calls = [event for event in events(history, "loss") if event.data.get("train")]
        yield cause(wrong, "backward is called on minus a loss: the optimizer makes it larger.", "Remove the sign.",
                    code=calls[0].code if calls else "")  # fmt: skip


@rule("loss_summed")
def loss_summed(history: RunHistory) -> Iterator[Finding]:
    """The loss is a sum over the batch and training does not get on: the rate is too high by the batch's size."""
    scaled = any(event.data.get("scaled") for event in events(history, "backward"))
    for calls in _training(history).values():
        if calls[0].data.get("reduction") == "sum" and not scaled and goes_wrong(history):
            size = int(np.prod(calls[0].data.get("input", {}).get("shape", [1])))
            yield cause(calls, f"The loss is summed over {size} elements, and so are gradients.",
                        "Use reduction='mean', or divide the loss by the batch's size.", elements=size)  # fmt: skip


@rule("labels_one_class", severity="error")
def labels_one_class(history: RunHistory, *, calls: int = 3, least: int = 8) -> Iterator[Finding]:
    """All targets that were seen are of one class.

    At least `calls` calls, at least `least` times.
    """
    found = [e for group in _training(history, "cross_entropy", "nll_loss").values() for e in group]
    known = [e for e in found if e.data.get("target", {}).get("classes")]
    if len(known) >= calls and all(e.data["target"]["classes"] == 1 for e in known):
        values = {e.data["target"]["most"] for e in known}
        size = sum(e.data["target"]["counts"][str(e.data["target"]["most"])] for e in known)
        if len(values) == 1 and size >= least * calls:
            yield cause(known, f"All {size} labels that were looked at are {values.pop()}.",
                        "Look at how labels are read; check the loss's target.")  # fmt: skip


@rule("labels_sorted")
def labels_sorted(history: RunHistory, *, share: float = 0.9, least: int = 8) -> Iterator[Finding]:
    """Nearly every batch holds one class, another one later: the data is sorted and not shuffled.

    In a share `share` of the cases, at least `least` times.
    """
    for calls in _training(history, "cross_entropy", "nll_loss").values():
        known = [e for e in calls if sum(e.data.get("target", {}).get("counts", {}).values()) >= least]
        pure = [e for e in known if e.data["target"]["share"] >= share]
        if len(known) >= 4 and len(pure) >= 0.8 * len(known) and len({e.data["target"]["most"] for e in pure}) > 1:
            epochs = events(history, "epoch")
            line = next((e.data.get("made_at") or e.code for e in epochs), "")
            yield cause(pure, "Batches hold one class each: the data is sorted by class and not shuffled.",
                        "Shuffle: DataLoader(…, shuffle=True).", code=line)  # fmt: skip


@rule("padding_in_loss")
def padding_in_loss(history: RunHistory, *, share: float = 0.3) -> Iterator[Finding]:
    """Padding is among the targets: more than `share` of them are the embedding's padding index."""
    padding = {m["padding_idx"] for m in modules(history) if m.get("padding_idx") is not None}
    for calls in _training(history, "cross_entropy", "nll_loss").values():
        parts = [(e, _share_of(e.data.get("target", {}), padding)) for e in calls]
        wrong = [(event, part) for event, part in parts if part > share]
        if padding and wrong and len(wrong) > len(calls) / 2:
            part = float(np.mean([p for _, p in wrong]))
            yield cause([e for e, _ in wrong], f"{text.percent(part, 1)} of the targets are padding, and count in the "
                        "loss.", f"Give the loss ignore_index={min(padding)}, or mask it.", share=part)  # fmt: skip


def _share_of(target: dict[str, Any], values: set[int]) -> float:
    counts = target.get("counts", {})
    total: int = sum(counts.values())
    return float(sum(n for c, n in counts.items() if int(c) in values) / max(total, 1))


@rule("targets_not_normalised")
def targets_not_normalised(history: RunHistory, *, most: float = 100.0) -> Iterator[Finding]:
    """Targets of a regression are far from unit size, and training does not get on.

    Farther than `most`.
    """
    for calls in _training(history, *_REGRESSION).values():
        known = [e.data["target"] for e in calls if "std" in e.data.get("target", {})]
        size = max((max(abs(t["mean"]), t["std"]) for t in known), default=0.0)
        if size > most and goes_wrong(history):
            yield cause(
                calls, f"Targets are of size {text.number(size)}.", "Scale them to mean 0 and std 1.", size=size
            )


@rule("loss_at_chance")
def loss_at_chance(history: RunHistory, *, steps: int = 30, near: float = 0.03) -> Iterator[Finding]:
    """The loss stays, to the last third of the run, within `near` of what the best constant answer would give.

    Over at least `steps` steps.
    """
    calls = [e for group in _training(history, "cross_entropy", "nll_loss").values() for e in group]
    chances = [e.data["chance"] for e in calls if e.data.get("chance")]
    values = loss_values(history)
    if len(values) < steps or not chances or len(_training(history)) != 1:
        return
    chance, end = float(np.mean(chances)), float(np.mean(values[-len(values) // 3 :]))
    begin = float(np.mean(values[: max(3, len(values) // 10)]))
    if chance > 0.05 and end >= (1 - near) * chance and end > 0.9 * begin:
        yield cause(calls, f"The loss ends at {text.number(end)}; answering without looking at the input would give "
                    f"{text.number(chance)}.", "Do labels belong to their inputs? Overfit one batch first.",
                    end=end, chance=chance)  # fmt: skip
