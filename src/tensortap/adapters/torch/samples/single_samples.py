"""Run every sample of a batch alone, in evaluation mode, so that samples do not affect each other."""

from __future__ import annotations

import math
from typing import Any

import torch

from tensortap.adapters.model_check import RankedSample
from tensortap.adapters.torch.model_check.subject import CheckedModel, NotApplicableError
from tensortap.adapters.torch.model_check.trace import traced
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.samples.rows import BAD, SampleNumbers, marks, sample_numbers
from tensortap.errors import UnsupportedError


def rank_samples(subject: CheckedModel, gradients: bool) -> tuple[RankedSample, ...]:
    """Return all samples, the most suspicious first."""
    try:
        count = subject.size
        alone = [_SingleSample(subject, count, row, gradients) for row in range(count)]
    except NotApplicableError as error:
        raise UnsupportedError(f"samples cannot be told apart: {error}") from error
    known = sample_numbers(count, [t for t in subject.given.values() if t.shape[:1] == (count,)], None)
    losses = None if alone[0].loss is None else torch.tensor([each.loss or 0.0 for each in alone])
    bad = torch.tensor([float(bool(each.site)) for each in alone])
    suspicion = SampleNumbers(count, known.bad_inputs, known.size, bad, losses).suspicion()
    suspicion += BAD * marks(torch.tensor([not math.isfinite(each.gradient) for each in alone]))
    total = sum(each.gradient for each in alone if math.isfinite(each.gradient))
    found = [
        RankedSample(
            row, float(suspicion[row]), int(known.bad_inputs[row]), float(known.size[row]), each.loss, each.site,
            _share(each.gradient, total) if gradients else None,
        )
        for row, each in enumerate(alone)
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda sample: -sample.suspicion))


class _SingleSample:
    """The results of one sample without the others."""

    def __init__(self, subject: CheckedModel, count: int, row: int, gradients: bool) -> None:
        batch = subject.replaced({slot: _row(t, count, row) for slot, t in subject.given.items()})
        self.loss: float | None = None
        self.site = ""
        self.gradient = 0.0
        with traced(subject.model) as trace:
            output = subject.output(batch, gradients=gradients)
        loss = self._loss(subject, output, count, row)
        if loss is not None:
            self.loss = float(loss.detach())
        # A mask's minus infinity is gone after its softmax; one that reaches the output or the loss is no mask.
        ends_bad = any(_is_bad(t, True) for _, t in tensors_in(output)) or not math.isfinite(self.loss or 0.0)
        outputs = [t for t in trace if t.port == "output"]
        self.site = next((f"{t.path}:{t.port}" for t in outputs if _is_bad(t.tensor, ends_bad)), "")
        if gradients and loss is not None and loss.requires_grad:
            self.gradient = _norm(subject, loss)

    @staticmethod
    def _loss(subject: CheckedModel, output: Any, count: int, row: int) -> torch.Tensor | None:
        try:
            return subject.loss(output, _target(subject, count, row))
        except NotApplicableError:
            return None


def _share(gradient: float, total: float) -> float | None:
    if not math.isfinite(gradient):
        return math.nan
    return gradient / total if total else None


def _is_bad(tensor: torch.Tensor, minus_infinity: bool) -> bool:
    """Return whether a tensor holds NaN or infinity; minus infinity only where it is asked for."""
    return bool((~tensor.isfinite() if minus_infinity else tensor.isnan() | (tensor == math.inf)).any())


def _row(tensor: torch.Tensor, count: int, row: int) -> torch.Tensor:
    return tensor[row : row + 1] if tensor.shape[:1] == (count,) else tensor


def _target(subject: CheckedModel, count: int, row: int) -> Any:
    """Return the target of one sample; several tensors stay in their container."""
    target = subject.question.target
    if isinstance(target, torch.Tensor):
        return _row(target, count, row)
    if target is not None and tensors_in(target):
        raise NotApplicableError("the target is more than one tensor")
    return target


def _norm(subject: CheckedModel, loss: torch.Tensor) -> float:
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return math.sqrt(sum(float(g.double().square().sum()) for g in found if g is not None))
