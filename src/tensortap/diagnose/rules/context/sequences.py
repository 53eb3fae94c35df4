"""Rules on sequences: what attention looks at, how targets follow the inputs, and which axis is the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tensortap import text
from tensortap.diagnose.history import RunHistory, SiteHistory
from tensortap.diagnose.rule import rule
from tensortap.diagnose.rules.context.shared import (
    CLASSES,
    cause,
    events,
    lines_of_activation,
    modules,
    owner,
    training_losses,
)
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding

_RECURRENT: Final = ("LSTM", "GRU", "RNN", "MultiheadAttention")


@rule("attention_not_causal", severity="error")
def attention_not_causal(history: RunHistory, *, ahead: float = 0.05) -> Iterator[Finding]:
    """Targets are the next tokens of the input, and attention sees them: more than `ahead` of it looks ahead."""
    if not _shifted(history, 1):
        return
    found = [(e, wrong) for e in events(history, "backward") if (wrong := _looking(e, "ahead", ahead))]
    if found and len(found) > len(events(history, "backward")) / 2:
        wrong = found[0][1]
        sites = [owner(w.get("site")) for w in wrong]
        share = max(w["ahead"] for w in wrong)
        yield cause([e for e, _ in found], f"The model predicts the next token, and {text.percent(share, 1)} of its "
                    "attention looks at tokens that come later: the answer is among them.",
                    "Mask the future: is_causal=True, or a triangular mask before the softmax.", site=sites[0],
                    places=[*sites[1:], *lines_of_activation(history, "Softmax")], ahead=share)  # fmt: skip


@rule("targets_not_shifted", severity="error")
def targets_not_shifted(history: RunHistory) -> Iterator[Finding]:
    """A model whose attention is causal is asked for the tokens it is given, or for those after the next.

    An encoder, whose attention looks ahead, may well be asked for its tokens again.
    """
    ahead = [a["ahead"] for e in events(history, "backward") for a in e.data.get("attention", ()) if "ahead" in a]
    causal = ahead and not any(ahead)
    for shift, said in ((0, "the tokens of the input themselves"), (2, "shifted by two positions")):
        calls = _shifted(history, shift)
        if calls and causal:
            yield cause(calls, f"The targets are {said}; a language model predicts the next token.",
                        "Shift once: logits[:, :-1] against tokens[:, 1:]; models of Hugging Face shift the "
                        "labels that they are given.", shift=shift)  # fmt: skip


@rule("padding_attended")
def padding_attended(history: RunHistory, *, share: float = 0.05, padding: float = 0.1) -> Iterator[Finding]:
    """Attention gives more than `share` of its weight to padding, where more than `padding` of the tokens are some."""
    found = [(e, wrong) for e in events(history, "backward") if (wrong := _padded(e, share, padding))]
    if found and len(found) > len(events(history, "backward")) / 2:
        wrong = found[0][1]
        sites = [owner(w.get("site")) for w in wrong]
        worst = max(w["at_padding"] for w in wrong)
        yield cause([e for e, _ in found], f"{text.percent(worst, 1)} of the attention is given to padding.",
                    "Give it a mask: key_padding_mask=(tokens == padding).", site=sites[0], places=sites[1:],
                    share=worst)  # fmt: skip


@rule("batch_axis_mixed", severity="error")
def batch_axis_mixed(history: RunHistory) -> Iterator[Finding]:
    """A recurrent layer or an attention expects (time, batch, …) and is given (batch, time, …): samples mix."""
    first = {
        m["path"]: m["type"] for m in modules(history) if m.get("batch_first") is False and m["type"] in _RECURRENT
    }
    batches = {e.data["input"]["shape"][0] for e in events(history, "batch") if e.data.get("input", {}).get("shape")}
    losses = [e.data.get("target", {}).get("shape") for calls in training_losses(history).values() for e in calls]
    targets = [shape for shape in losses if shape and shape[0] in batches]
    wrong = [site for site in history.sites("output") if site.module in first and _by_batch(site, targets)]
    names = list(dict.fromkeys(site.module for site in wrong))
    if names:
        yield cause(events(history, "batch")[:1], f"{first[names[0]]} takes its first axis for time, and is given "
                    f"{list(wrong[0].shape)}, of which the first is the batch: samples are one sequence.",
                    "Make it with batch_first=True.", site=names[0], places=names[1:])  # fmt: skip


@rule("positions_constant")
def positions_constant(history: RunHistory, *, steps: int = 3) -> Iterator[Finding]:
    """A table of positions is read at one row only: to the model all positions are the same.

    Its gradient has one row at each step that was looked at, `steps` at least.
    """
    tables = {f"{m['path']}.weight" for m in modules(history) if m["type"] == "Embedding" and _of_positions(m["path"])}
    rows: dict[str, list[float]] = {}
    for event in events(history, "parameters"):
        columns = (event.data.get(key) or () for key in ("names", "shapes", "grad"))
        for name, shape, numbers in zip(*columns, strict=False):
            if name in tables and shape[0] >= 4 and isinstance(numbers[-1], (int, float)):
                rows.setdefault(name, []).append((1 - numbers[-1]) * shape[0])
    for name, counts in rows.items():
        if len(counts) >= steps and all(0 < count < 1.5 for count in counts):
            yield cause(events(history, "model")[:1], f"Of {owner(name)} one row is read, at all positions alike.",
                        "Give it torch.arange(length), the positions.", site=owner(name))  # fmt: skip


def _of_positions(path: str) -> bool:
    name = path.rpartition(".")[-1].lower()
    return "pos" in name or name == "wpe"


def _by_batch(site: SiteHistory, targets: list[list[int]]) -> bool:
    """Return whether the first axis is that of the targets, and the second is none of theirs."""
    shape = site.shape
    if len(shape) != 3 or min(shape[:2]) < 2 or any(shape[1] in target[:2] for target in targets):
        return False
    return any(shape[0] == target[0] for target in targets)


def _shifted(history: RunHistory, shift: int) -> list[TrainingEvent]:
    """Return the loss calls whose targets are the inputs, so many positions later; none unless most are."""
    calls = [e for group in training_losses(history, *CLASSES).values() for e in group if "shift" in e.data]
    found = [e for e in calls if e.data.get("shift") == shift]
    return found if len(found) > len(calls) / 2 else []


def _looking(event: TrainingEvent, what: str, least: float) -> list[dict[str, Any]]:
    return [a for a in event.data.get("attention", ()) if a.get(what, 0.0) > least]


def _padded(event: TrainingEvent, share: float, padding: float) -> list[dict[str, Any]]:
    return [a for a in _looking(event, "at_padding", share) if a["padding"] > padding]
