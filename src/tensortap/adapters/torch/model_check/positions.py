"""Check whether a position's output depends on later positions, and whether the result depends on padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from tensortap import text
from tensortap.adapters.torch.model_check.rows import exchanged, leak
from tensortap.adapters.torch.model_check.samples import located
from tensortap.adapters.torch.model_check.subject import (
    CheckedModel,
    NotApplicableError,
    floats,
    main_output,
    own_loss,
    user_code,
)
from tensortap.adapters.torch.model_check.trace import first_change, traced
from tensortap.finding import Finding, Severity

IGNORED: Final = -100  # the label that PyTorch's losses leave out
_MORE: Final = 3  # positions of padding that are added
_MASKS: Final = ("attention_mask", "padding_mask", "key_padding_mask", "src_key_padding_mask", "mask")


class _Sequence(NamedTuple):
    slot: str
    tensor: Tensor
    axis: int

    @property
    def length(self) -> int:
        return int(self.tensor.shape[self.axis])


def future_seen(subject: CheckedModel) -> Iterator[Finding]:
    """Replace the later half of the tokens, and compare the outputs of the earlier half."""
    sequence = _sequence(subject)
    sure = subject.question.causal
    if sure is False:
        raise NotApplicableError("causal=False")
    why = "" if sure else _next_tokens(subject, sequence)
    if not (sure or why):
        raise NotApplicableError("nothing says that later positions are to be predicted; say so with causal=True")
    kept = torch.arange(sequence.length) <= sequence.length // 2
    other = _later_exchanged(subject, sequence, kept)
    before, after = (main_output(subject.output(batch)).detach() for batch in (subject.batch, other))
    size = leak(before, after, sequence.length, kept)
    if size is None:
        raise NotApplicableError(f"no output has an axis of {sequence.length} positions")
    if size:
        path = _origin(subject, other, sequence.length, kept)
        share = text.number(100 * size)
        yield Finding("future_seen", "error", f"{path}:output", None, {"change": size, "length": sequence.length},
                      f"The output at a position changes by {share} % of its size when later positions do"
                      f"{', and ' + why if why else ''}: it can copy the answer.",
                      advice="Mask the later positions: is_causal=True, or a mask that is -inf above the diagonal; pad "
                      "convolutions on the left only.", code=user_code(subject.model, path))  # fmt: skip


def _sequence(subject: CheckedModel) -> _Sequence:
    """Return the input that is a sequence: token numbers, or vectors with an axis of positions."""
    axis = 0 if subject.axis == 1 else 1
    tokens = [(s, t) for s, t in subject.given.items() if _is_tokens(t) and not _is_label(s)]
    vectors = [(s, t) for s, t in subject.given.items() if t.dim() == 3 and t.is_floating_point()]
    for slot, tensor in (*sorted(tokens, key=lambda each: not each[0].endswith("input_ids")), *vectors):
        if tensor.shape[axis] > 2:
            return _Sequence(slot, tensor, axis)
    raise NotApplicableError("no input is a sequence of more than two positions")


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32) and len(torch.unique(tensor)) > 2


def _is_label(slot: str) -> bool:
    return "label" in slot or slot.rpartition(".")[2] in ("target", "targets", "position_ids", "token_type_ids")


def _next_tokens(subject: CheckedModel, sequence: _Sequence) -> str:
    """Return why the model seems to predict the next token: its target is its input, shifted. Empty if it does not."""
    tokens, target = sequence.tensor, subject.question.target
    if isinstance(target, Tensor) and target.shape == tokens.shape:
        axis = sequence.axis
        ahead, now = target.narrow(axis, 0, sequence.length - 1), tokens.narrow(axis, 1, sequence.length - 1)
        return "targets are the next tokens" if bool((ahead == now).all()) else ""
    labels = next((t for s, t in subject.given.items() if _is_label(s) and t.shape == tokens.shape), None)
    if labels is None or not bool(((labels == tokens) | (labels == IGNORED)).all()):
        return ""
    return "labels are the tokens, which the model shifts" if _first_is_unread(subject, labels) else ""


def _first_is_unread(subject: CheckedModel, labels: Tensor) -> bool:
    """Return whether the first label does not matter: then labels are shifted inside the model."""
    slot = next(s for s, t in subject.given.items() if t is labels)
    other = labels.clone()
    other[:, 0] = labels[:, 1]
    same = [own_loss(subject.output(b)) for b in (subject.batch, subject.replaced({slot: other}))]
    return not torch.equal(labels, other) and all(v is not None for v in same) and bool(same[0] == same[1])


def _later_exchanged(subject: CheckedModel, sequence: _Sequence, kept: Tensor) -> Any:
    """Return the batch with other values at later positions; merely reordered, they might add up to the same."""
    places = (~kept).nonzero()[:, 0].to(sequence.tensor.device)
    return subject.replaced({sequence.slot: exchanged(sequence.tensor, sequence.axis, places, places)})


def _origin(subject: CheckedModel, other: Any, length: int, kept: Tensor) -> str:
    traces = []
    for batch in (subject.batch, other):
        with traced(subject.model) as trace:
            floats(subject.output(batch))
        traces.append(trace)
    return located(subject.model, first_change(traces[0], traces[1], lambda a, b: bool(leak(a, b, length, kept))))[0]


def padding_seen(subject: CheckedModel) -> Iterator[Finding]:
    """Add padding at the end, and compare the outputs of the original positions."""
    slot, mask = _mask(subject)
    sequence = _sequence(subject)
    if mask.shape != sequence.tensor.shape[:2] or sequence.axis != 1:
        raise NotApplicableError(f"the mask{slot} has another shape than the sequence{sequence.slot}")
    padding = _padding_value(mask)
    if bool((mask[:, 0] == padding).any()):
        raise NotApplicableError("the batch is padded on the left, where padding moves the positions")
    before, after = subject.output(), subject.output(_padded(subject, sequence, slot, padding))
    kept = mask != padding
    sizes = {name: _change(t, floats(after).get(name), kept) for name, t in floats(before).items()}
    seen = {name: size for name, size in sizes.items() if size is not None and size[0] > 0}
    if not any(size is not None for size in sizes.values()):
        raise NotApplicableError("no output could be compared")
    if seen:
        yield _padding_finding(subject, seen, slot)


def _mask(subject: CheckedModel) -> tuple[str, Tensor]:
    for slot, tensor in subject.given.items():
        if slot.rpartition(".")[2] in _MASKS and tensor.dim() == 2:
            return slot, tensor
    raise NotApplicableError("the batch has no mask of padding")


def _padding_value(mask: Tensor) -> Any:
    """Return the mask's value for padding: 0 where ones are tokens, True for masks of PyTorch's own layers."""
    if mask.dtype == torch.bool:
        return bool(mask.float().mean() < 0.5)
    return 0


def _padded(subject: CheckedModel, sequence: _Sequence, mask_slot: str, padding: Any) -> Any:
    """Return the batch with a few more positions in every tensor that has one value, or vector, for each position."""
    longer = {}
    for slot, tensor in subject.given.items():
        if tensor.dim() < 2 or tensor.shape[:2] != sequence.tensor.shape[:2]:
            continue
        value = padding if slot == mask_slot else IGNORED if _is_labels(slot) else _filler(subject, slot, sequence)
        more = torch.full((tensor.shape[0], _MORE, *tensor.shape[2:]), value, dtype=tensor.dtype, device=tensor.device)
        longer[slot] = torch.cat([tensor, more], 1)
    return subject.replaced(longer)


def _is_labels(slot: str) -> bool:
    return "label" in slot


def _filler(subject: CheckedModel, slot: str, sequence: _Sequence) -> Any:
    if slot != sequence.slot or sequence.tensor.is_floating_point():
        return 0
    said = getattr(getattr(subject.model, "config", None), "pad_token_id", None)
    if isinstance(said, int) and said >= 0:
        return said
    indices = [m.padding_idx for m in subject.model.modules() if isinstance(m, nn.Embedding)]
    return next((i for i in indices if i is not None), 0)


def _change(before: Tensor, after: Tensor | None, kept: Tensor) -> tuple[float, float] | None:
    """Return the largest change of the tokens' outputs, and the share that changed; pooled outputs count whole."""
    if after is None or before.dim() != after.dim():
        return None
    if before.shape == after.shape:
        rows = torch.ones(before.shape[0], dtype=torch.bool)
        size = leak(before, after, before.shape[0], rows)
        return None if size is None else (size, 1.0 if size else 0.0)
    if before.shape[:2] != kept.shape or after.shape[1] != before.shape[1] + _MORE:
        return None
    a, b = before[kept], after[:, : before.shape[1]][kept]
    if a.shape != b.shape:
        return None
    size = leak(a, b, a.shape[0], torch.ones(a.shape[0], dtype=torch.bool))
    moved = ((a - b).abs() > torch.finfo(a.dtype).eps ** 0.5 * a.abs().mean()).flatten(1).any(1)
    return (size or 0.0), float(moved.float().mean())


def _padding_finding(subject: CheckedModel, seen: Mapping[str, tuple[float, float]], slot: str) -> Finding:
    size, share = max(seen.values())
    severity: Severity = "warning" if share > 0.5 else "info"  # a convolution sees padding only near the end
    return Finding("padding_seen", severity, "", None, {"change": size, "share": share, "outputs": sorted(seen)},
                   f"With {_MORE} more positions of padding, masked by{slot}, outputs change by "
                   f"{text.number(100 * size)} % of their size.",
                   advice="Use the mask in every layer that mixes positions, and in the pooling.",
                   code=user_code(subject.model, ""))  # fmt: skip
