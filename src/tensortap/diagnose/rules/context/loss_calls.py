"""Rules on calls of losses: whether output, loss and target fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import rule
from tensortap.diagnose.rules.context.shared import (
    BINARY,
    REGRESSION,
    cause,
    events,
    goes_wrong,
    lines_of_activation,
    owner,
    training_losses,
)
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding

_BOUNDS: Final = {"Sigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Softmax": (0.0, 1.0), "Relu": (0.0, np.inf)}


def _last_operation(event: TrainingEvent) -> str:
    operations = event.data.get("operations") or [""]
    return str(operations[0])


@rule("activation_loss_mismatch", severity="error")
def activation_loss_mismatch(history: RunHistory) -> Iterator[Finding]:
    """The last activation and the loss do not fit: softmax twice, sigmoid twice, logits where probabilities belong."""
    for calls in training_losses(history).values():
        said = [_mismatch(event) for event in calls]
        wrong = [event for event, why in zip(calls, said, strict=True) if why]
        if wrong and len(wrong) > len(calls) / 2:
            what, advice = next(why for why in said if why)
            first = wrong[0]
            yield cause(wrong, what, advice, site=owner(first.data.get("produced_by")), loss=first.name,
                        operations=first.data.get("operations"),
                        places=lines_of_activation(history, _last_operation(first)))  # fmt: skip


def _mismatch(event: TrainingEvent) -> tuple[str, str] | None:
    data, last = event.data, _last_operation(event)
    given, target = data.get("input", {}), data.get("target", {})
    if not data.get("requires_grad"):
        return None
    if event.name == "cross_entropy":
        return _of_cross_entropy(given, target, last)
    if event.name == "log_loss":
        return _of_log(data, last)
    if data.get("keras"):
        return _of_keras(event.name, data, last)
    twice = [str(name) for name in data.get("operations", ())[:2]]
    if event.name == "nll_loss" and twice == ["LogSoftmax", "Softmax"]:
        return _TWICE
    if event.name == "nll_loss" and len(given.get("shape", ())) > 1 and 1 not in given.get("exp_sums_to_one", ()):
        wrong_axis = any(axis != 1 for _, axis, *_ in data.get("softmax", ()))
        if given.get("shape", [0, 2])[1] > 1 and not wrong_axis and last != "LogSoftmax":  # or a part of one
            return ("nll_loss wants log-probabilities, and its input is none: exp of it does not sum to one.",
                    "Use cross_entropy on the logits, or log_softmax(…, dim=1) before nll_loss.")  # fmt: skip
    if event.name == "kl_div" and given.get("max", -1.0) > 1e-3:
        return ("kl_div wants log-probabilities, and its input has positive values.",
                "Give it log_softmax(…), not softmax or logits.")  # fmt: skip
    if event.name == "binary_cross_entropy_with_logits" and last in ("Sigmoid", "Softmax", "Relu", "LogSigmoid"):
        return (f"{last.lower()} is applied before binary_cross_entropy_with_logits, which applies a sigmoid itself.",
                f"Remove the {last.lower()} from the output, or use binary_cross_entropy.")  # fmt: skip
    if event.name == "binary_cross_entropy" and last == "Softmax" and _several_labels(target):
        return _SEVERAL
    return None


def _of_log(data: dict[str, Any], last: str) -> tuple[str, str] | None:
    """Judge a cross entropy that is written out: what the logarithm is taken of."""
    target, given = data.get("target", {}), data.get("input", {})
    if last in _UNBOUNDED and given.get("min", 0.0) < 0.9:  # above it something like log(1 + x) was meant
        what = "a relu" if last == "Relu" else "a linear layer"
        return (f"The logarithm in the loss is taken of the output of {what}, which is no probability.",
                "End in a softmax (or sigmoid), or use cross_entropy on the logits.")  # fmt: skip
    if [str(name) for name in data.get("operations", ())[:2]] == ["Softmax", "Softmax"]:
        return _TWICE
    if not target.get("binary") or len(given.get("shape", ())) != 2 or given["shape"][1] < 2:
        return None
    low, high = target["row_sums"]
    exclusive = low == high == 1
    if last == "Sigmoid" and exclusive and data.get("logs") == 1 and given["shape"][1] > 2:
        return ("Classes exclude each other, and each has a sigmoid of its own: with the positive term alone all of "
                "them can become 1.", "Use a softmax over the classes, or cross_entropy on the logits.")  # fmt: skip
    if last == "Softmax" and not exclusive and (low < 0.5 or high > 1.5):
        return _SEVERAL
    return None


_CROSS: Final = ("categorical_crossentropy", "sparse_categorical_crossentropy")
_UNBOUNDED: Final = ("Addmm", "Mm", "Linear", "Convolution", "Relu")
_TWICE: Final = ("softmax is applied twice: the second one flattens the result of the first.", "Remove one of them.")
_SEVERAL: Final = (
    "softmax makes the outputs compete, but samples have several labels or none.",
    "Use a sigmoid for each label (binary cross entropy).",
)


def _of_keras(name: str, data: dict[str, Any], last: str) -> tuple[str, str] | None:
    if not last or name not in (*_CROSS, "binary_crossentropy"):
        return None
    if data.get("from_logits"):
        if last in ("Softmax", "Sigmoid", "Relu", "Tanh"):
            return (f"The output ends in {last.lower()}, and the loss applies a softmax or sigmoid itself "
                    "(from_logits=True).", "Remove the activation, or from_logits=True.")  # fmt: skip
        return None
    wanted = "softmax" if name in _CROSS else "sigmoid"
    if last == "Softmax" and _several_labels(data.get("target", {})) and name != "sparse_categorical_crossentropy":
        return _SEVERAL
    if last not in ("Softmax", "Sigmoid") or (name in _CROSS and last == "Sigmoid" and not _one_or_two(data)):
        what = "no activation" if last == "Addmm" else last.lower()
        return (f"{name} wants probabilities, and the output has {what}.",
                f'Use activation="{wanted}", or from_logits=True with a linear output.')  # fmt: skip
    return None


def _one_or_two(data: dict[str, Any]) -> bool:
    return bool(data.get("input", {}).get("shape", [0, 9])[-1] <= 2)


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
    """A softmax before the loss, or of an attention, runs over the batch: samples compete instead of classes."""
    for calls in training_losses(history).values():
        wrong = [e for e in calls if any(axis == 0 and axes > 1 for _, axis, axes, *_ in e.data.get("softmax", ()))]
        wrong = wrong or [e for e in calls if e.name == "log_loss" and _over_the_batch(e.data)]
        if wrong:
            yield cause(wrong, "The softmax before the loss runs over axis 0, the batch: its samples compete.",
                        "Use dim=1 (or dim=-1), the axis of classes.",
                        site=owner(wrong[0].data.get("produced_by")), places=_lines_of_softmax(history))  # fmt: skip
            return
    across = [(e, a) for e in events(history, "backward") for a in e.data.get("attention", ()) if _wrong_axis(a)]
    if across:
        event, attention = across[0]
        whose = "queries compete" if attention["axis"] == len(attention["shape"]) - 2 else "samples compete, or heads"
        yield cause([event], f"The softmax of an attention of shape {attention['shape']} runs over axis "
                    f"{attention['axis']}: {whose}.", "Use dim=-1, the axis of keys.",
                    site=owner(attention.get("site")), places=_lines_of_softmax(history))  # fmt: skip


def _wrong_axis(attention: dict[str, Any]) -> bool:
    """Return whether the weights of an attention sum to one over another axis than that of the keys.

    Where they are turned before the product, either of the last two may be that of the keys.
    """
    if "axis" not in attention:
        return False
    over, last = attention["axis"], len(attention["shape"]) - 1
    return bool(over < last - 1 or (over == last - 1 and attention.get("upright") and attention["shape"][-1] > 1))


def _lines_of_softmax(history: RunHistory) -> list[str]:
    return [*lines_of_activation(history, "Softmax"), *lines_of_activation(history, "LogSoftmax")]


def _over_the_batch(data: dict[str, Any]) -> bool:
    sums = data.get("input", {}).get("sums_to_one", ())
    return len(data.get("input", {}).get("shape", ())) == 2 and 0 in sums and 1 not in sums


@rule("constant_output", severity="error")
def constant_output(history: RunHistory) -> Iterator[Finding]:
    """A softmax over one output is always 1, and cross_entropy over one class always 0."""
    for calls in training_losses(history).values():
        soft = [e for e in calls if any(_length(e, *softmax) == 1 for softmax in e.data.get("softmax", ()))]
        single = [e for e in calls if e.name == "cross_entropy" and e.data.get("input", {}).get("shape", [])[1:] == [1]]
        if wrong := soft or single:
            yield cause(wrong, "There is one output, and a softmax over one output is always 1: nothing can be learnt.",
                        "Use a sigmoid (BCEWithLogitsLoss on the logit), or two outputs.",
                        site=owner(wrong[0].data.get("produced_by")), places=_lines_of_softmax(history))  # fmt: skip


def _length(event: TrainingEvent, _: str, axis: int, axes: int, length: int | None = None) -> int:
    """Return over how many outputs a softmax runs; of runs that do not say so, the last axis of the loss's input."""
    shape = event.data.get("input", {}).get("shape") or [0]
    return length if length is not None else shape[-1] if axis == axes - 1 else 0


@rule("output_bounded", severity="error")
def output_bounded(history: RunHistory, *, margin: float = 0.1) -> Iterator[Finding]:
    """The output's activation cannot reach the targets: they leave its range by `margin` of their own."""
    for calls in training_losses(history, *REGRESSION).values():
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
                        low=low, high=high, places=lines_of_activation(history, last))  # fmt: skip


@rule("loss_broadcast", severity="error")
def loss_broadcast(history: RunHistory) -> Iterator[Finding]:
    """Output and target have shapes that broadcast, so that every output meets every target."""
    for calls in training_losses(history, *REGRESSION).values():
        wrong = [e for e in calls if _differ(e.data)]
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


def _differ(data: dict[str, Any]) -> bool:
    a, b = (data.get(name, {}).get("shape") for name in ("input", "target"))
    if data.get("keras") and a and b and len(a) == len(b) + 1 and a[-1] == 1:
        a = a[:-1] if len(b) > 1 else b  # Keras gives plain labels a column, and else takes the last axis away
    return a is not None and b is not None and a != b and int(np.prod(a)) > 1 and int(np.prod(b)) > 1


def _pairwise(broadcast: dict[str, Any]) -> bool:
    result, inputs = broadcast["result"], broadcast["inputs"]
    return (broadcast["op"] == "Sub" and len(inputs) == 1 and len(result) == 2 and result[0] == result[1] > 1
            and inputs[0] in ([result[0], 1], [result[0]]))  # fmt: skip


@rule("loss_negated", severity="error")
def loss_negated(history: RunHistory) -> Iterator[Finding]:
    """The optimizer minimises the negative of a loss, or is set to maximise it."""
    rising = [e for e in events(history, "optimizer") if any(g.get("maximize") for g in e.data.get("groups", ()))]
    if rising and any(e.data.get("train") for e in events(history, "loss")):
        yield cause(rising, f"{rising[0].name} is set to maximise, and it is given a loss.", "Remove maximize=True.")
        return
    wrong = [event for event in events(history, "backward") if event.data.get("negated")]
    if wrong and len(wrong) > len(events(history, "backward")) / 2:
        calls = [event for event in events(history, "loss") if event.data.get("train")]
        yield cause(wrong, "backward is called on minus a loss: the optimizer makes it larger.", "Remove the sign.",
                    code=calls[0].code if calls else "")  # fmt: skip
        return
    yield from _avoids_rewards(history)


def _avoids_rewards(history: RunHistory, least: int = 3) -> Iterator[Finding]:
    """Judge a policy gradient: it is the logarithm of a probability times a reward that minimising makes smaller."""
    known = [e for e in events(history, "backward") if e.data.get("policy")]
    if len(known) >= least and all(e.data["policy"].get("sign") == 1 for e in known):
        name = known[0].data["policy"].get("reward", "")
        yield cause(known, f"The loss is a log-probability times {name}, with no minus sign: actions become rarer the "
                    "higher it is.", f"Minimise -(log_prob * {name}).", severity="warning",
                    code=known[0].data["policy"].get("made_at") or known[0].data.get("made_at") or known[0].code,
                    reward=name)  # fmt: skip


@rule("loss_summed")
def loss_summed(history: RunHistory) -> Iterator[Finding]:
    """The loss is a sum over the batch and training does not get on: the rate is too high by the batch's size."""
    scaled = any(event.data.get("scaled") for event in events(history, "backward"))
    for calls in training_losses(history).values():
        if calls[0].data.get("reduction") == "sum" and not scaled and goes_wrong(history):
            size = int(np.prod(calls[0].data.get("input", {}).get("shape", [1])))
            yield cause(calls, f"The loss is summed over {size} elements, and so are gradients.",
                        "Use reduction='mean', or divide the loss by the batch's size.", elements=size)  # fmt: skip


@rule("targets_not_normalised")
def targets_not_normalised(history: RunHistory, *, most: float = 100.0) -> Iterator[Finding]:
    """Targets of a regression are far from unit size, and training does not get on.

    Farther than `most`.
    """
    for calls in training_losses(history, *REGRESSION).values():
        known = [e.data["target"] for e in calls if "std" in e.data.get("target", {})]
        known = known or [e.data["difference"] for e in calls[:1] if "std" in e.data.get("difference", {})]
        size = max((max(abs(t["mean"]), t["std"]) for t in known), default=0.0)
        if size > most and goes_wrong(history):
            yield cause(
                calls, f"Targets are of size {text.number(size)}.", "Scale them to mean 0 and std 1.", size=size
            )


@rule("loss_unsuitable")
def loss_unsuitable(history: RunHistory) -> Iterator[Finding]:
    """A squared or absolute error, or a binary cross entropy, is taken of softmax outputs and one-hot classes."""
    for calls in training_losses(history, *REGRESSION, *BINARY).values():
        wrong = [e for e in calls if _last_operation(e) == "Softmax" and _one_hot(e.data.get("target", {}))]
        least = 3 if calls[0].name in BINARY else 2  # of two classes both are one question
        if wrong and len(wrong) > len(calls) / 2 and wrong[0].data["input"]["shape"][-1] >= least:
            why = "each class is taken for a question of its own" if wrong[0].name in BINARY else (
                "where the answer is surely wrong the gradient vanishes"
            )  # fmt: skip
            yield cause(wrong, f"{wrong[0].name} compares softmax outputs with one-hot classes: {why}.",
                        "Use cross_entropy on the logits.",
                        site=owner(wrong[0].data.get("produced_by")))  # fmt: skip


def _one_hot(target: dict[str, Any]) -> bool:
    return bool(target.get("binary")) and target.get("row_sums") == [1.0, 1.0]


@rule("log_of_zero", severity="error")
def log_of_zero(history: RunHistory) -> Iterator[Finding]:
    """The loss takes the logarithm of a probability that has become zero."""
    wrong = [e for e in events(history, "loss") if e.name == "log_loss" and e.data.get("zeros")]
    if wrong:
        yield cause(wrong, f"The loss takes the logarithm of {wrong[0].data['zeros']} probabilities that are 0.",
                    "Use cross_entropy on the logits (or log_softmax), which cannot underflow.",
                    site=owner(wrong[0].data.get("produced_by")))  # fmt: skip
