"""Check whether a sample's output depends on the other samples of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tensortap import text
from tensortap.adapters.torch.model_check.rows import exchanged, leak, one_row_changed
from tensortap.adapters.torch.model_check.subject import CheckedModel, Named, NotApplicableError, floats, user_code
from tensortap.adapters.torch.model_check.trace import Trace, first_change, traced
from tensortap.finding import Finding, Severity

RULE: Final = "samples_mixed"
_BY_DESIGN: Final = (_BatchNorm,)
_RECURRENT: Final = (nn.RNNBase, nn.MultiheadAttention)


def samples_mixed(subject: CheckedModel) -> Iterator[Finding]:
    """Replace one sample by another, and compare the outputs of the others, in evaluation and in training mode."""
    count = subject.size
    _refuse_related(subject, count)
    if count < 2:
        raise NotApplicableError("the batch holds one sample; give two or more")
    mixed = _mixed(subject, count, subject.axis, training=False)
    if mixed is None:
        raise NotApplicableError(f"no output has an axis of {count} samples")
    if not mixed:
        yield from _in_training(subject, count)
    elif _reordered(subject, count):
        yield _in_other_order(subject, count)
    elif not _mixed(subject, count, subject.axis, training=False, calls=2):
        yield _finding(subject, "info", "", "The first batch that the model sees sets a state that later ones depend "
                       "on.", "Save that state with the model: is it a buffer?", {"samples": count})  # fmt: skip
    else:
        yield _in_evaluation(subject, count, mixed)


def _refuse_related(subject: CheckedModel, count: int) -> None:
    """Raise where an input relates rows to each other, as edges of a graph do: they are meant to mix."""
    for slot, tensor in subject.given.items():
        square = tensor.dim() == 2 and tuple(tensor.shape) == (count, count) and len(subject.given) > 1
        edges = tensor.dim() == 2 and tensor.shape[0] == 2 != count and not tensor.is_floating_point()
        sparse = tensor.layout is not torch.strided
        if square or edges or sparse:
            raise NotApplicableError(f"the input{slot} relates the rows to each other, as the edges of a graph do")
    most = max((t.dim() for t in subject.given.values()), default=0)
    if count > 1 and any(t.dim() > most and t.shape[0] == 1 for t in subject.outputs().values()):
        raise NotApplicableError("the model puts an axis of one sample before the rows: they are positions")


def other_batch(subject: CheckedModel, count: int, axis: int, row: int) -> Any:
    """Return the batch with one sample replaced by its neighbour."""
    places, source = torch.tensor([row]), torch.tensor([(row + 1) % count])
    return subject.replaced({
        slot: exchanged(t, axis, places.to(t.device), source.to(t.device))
        for slot, t in subject.given.items()
        if t.dim() > axis and t.shape[axis] == count
    })  # fmt: skip


def _mixed(subject: CheckedModel, count: int, axis: int, training: bool, calls: int = 1) -> dict[str, float] | None:
    """Return the outputs in which other samples changed, and by how much; None where no output has samples."""
    row = count // 2
    before = _called(subject, subject.batch, training, calls)
    after = _called(subject, other_batch(subject, count, axis, row), training, calls)
    found = {slot: leak(t, after[slot], count, _others(count, row)) for slot, t in before.items() if slot in after}
    known = {slot: size for slot, size in found.items() if size is not None}
    return {slot: size for slot, size in known.items() if size > 0} if known else None


def _called(subject: CheckedModel, batch: Any, training: bool, calls: int) -> Named:
    """Return the model's output for a batch, called after the original batch."""
    if calls == 1:
        return subject.outputs(batch, training)
    subject.output(training=training)
    with torch.no_grad():
        return floats(subject.call(batch))


def _reordered(subject: CheckedModel, count: int) -> bool:
    before = subject.outputs()
    after = subject.outputs(other_batch(subject, count, subject.axis, count // 2))
    pairs = [(t, after[slot]) for slot, t in before.items() if slot in after and t.shape == after[slot].shape]
    return all(one_row_changed(a, b, count) for a, b in pairs if leak(a, b, count, _others(count, count)))


def _in_other_order(subject: CheckedModel, count: int) -> Finding:
    severity: Severity = "info" if subject.question.target is None else "warning"
    return _finding(subject, severity, "", "Outputs are in another order than samples: one sample changes the output "
                    "of another, and of no other.", "Put targets in that order too.", {"samples": count})  # fmt: skip


def _others(count: int, row: int) -> Tensor:
    return torch.arange(count) != row


def _in_evaluation(subject: CheckedModel, count: int, mixed: dict[str, float]) -> Finding:
    path, cause = _origin(subject, count, training=False)
    share = max(mixed.values())
    evidence = {"change": share, "outputs": sorted(mixed), "samples": count}
    if isinstance(cause, _BY_DESIGN):
        message = (
            f"{type(cause).__name__} normalises over the batch in evaluation mode too: it has no running statistics."
        )
        return _finding(subject, "info", path, message, "Use track_running_stats=True unless it is meant.", evidence)
    if _takes_one_sequence(cause, subject):
        message = "Its input has two axes: a sequence without a batch, whose rows are positions."
        return _finding(subject, "info", path, message, "Give it three axes if rows are samples.", evidence)
    if subject.question.batch_axis is None and _other_axis_is_free(subject, path):
        said = "Rows of axis 0 depend on each other, those of axis 1 do not: the batch seems to be axis 1."
        if not _axis_is_sure(subject, count):
            advice = "If it is, check with batch_axis=1; if the batch is axis 0, set batch_first=True."
            return _finding(subject, "info", path, said, advice, evidence)
        advice = "Set batch_first=True, or transpose the input: x.transpose(0, 1)."
        return _finding(subject, "error", path, f"{said} Targets say that it is axis 0.", advice, evidence)
    message = f"A sample's output changes by {text.number(100 * share)} % of its size when another sample does."
    advice = "Look for a softmax, mean, norm, attention or reshape over the batch axis."
    return _finding(subject, "error", path, message, advice, evidence)


def _in_training(subject: CheckedModel, count: int) -> Iterator[Finding]:
    mixed = _mixed(subject, count, subject.axis, training=True)
    if mixed:
        path, cause = _origin(subject, count, training=True)
        kind = type(cause).__name__ if cause is not None else "a module"
        why = "which normalises over the batch" if isinstance(cause, _BY_DESIGN) else "in training mode only"
        yield _finding(subject, "info", path, f"Samples influence each other through {kind}, {why}.",
                       "Worth knowing for small batches and gradient accumulation.",
                       {"change": max(mixed.values()), "samples": count})  # fmt: skip


def _origin(subject: CheckedModel, count: int, training: bool) -> tuple[str, nn.Module | None]:
    """Return the first module whose output mixes samples."""
    row = count // 2
    traces = _two_traces(subject, other_batch(subject, count, subject.axis, row), training)
    found = first_change(*traces, lambda a, b: bool(leak(a, b, count, _others(count, row))))
    return located(subject.model, found)


def _two_traces(subject: CheckedModel, other: Any, training: bool = False) -> tuple[Trace, Trace]:
    with traced(subject.model) as before:
        subject.output(training=training)
    with traced(subject.model) as after:
        subject.output(other, training)
    return before, after


def located(model: nn.Module, found: tuple[str, str] | None) -> tuple[str, nn.Module | None]:
    """Return the path and the module of a change; for a container without a forward, those of the module around it."""
    if found is None:
        return "", None
    path, module = found[0], model.get_submodule(found[0])
    while isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
    return path, module if found[1] == "output" else None


def _other_axis_is_free(subject: CheckedModel, path: str) -> bool:
    """Return whether some layers take the batch on axis 1 and the one that mixes axis 0 does not mix axis 1."""
    later = [m for m in subject.model.modules() if isinstance(m, _RECURRENT) and not m.batch_first]
    sizes = [t.shape[1] for t in subject.given.values() if t.dim() > 1]
    if not later or not sizes or sizes[0] < 2:
        return False
    count, row = sizes[0], sizes[0] // 2
    pairs = zip(*_two_traces(subject, other_batch(subject, count, 1, row)), strict=False)
    leaks = [leak(a.tensor, b.tensor, count, _others(count, row)) for a, b in pairs if a[:2] == (path, "output")]
    return bool(leaks) and not any(leaks)


def _takes_one_sequence(cause: nn.Module | None, subject: CheckedModel) -> bool:
    """Return whether a layer that takes sequences is given rows without a batch; where rows have targets, no."""
    flat = all(t.dim() <= 2 for t in subject.given.values() if t.is_floating_point())
    return isinstance(cause, _RECURRENT) and flat and subject.question.target is None


def _axis_is_sure(subject: CheckedModel, count: int) -> bool:
    """Return whether targets, one for each sample, tell which axis is the batch."""
    target = subject.question.target
    first = next((t for t in subject.given.values() if t.dim() > 1), None)
    if not isinstance(target, Tensor) or first is None or target.dim() != 1:
        return False
    return target.shape[0] == first.shape[0] == count != first.shape[1]


def _finding(
    subject: CheckedModel, severity: Severity, path: str, message: str, advice: str, evidence: dict[str, Any]
) -> Finding:
    site = f"{path}:output"
    return Finding(RULE, severity, site, None, evidence, message, advice=advice, code=user_code(subject.model, path))
