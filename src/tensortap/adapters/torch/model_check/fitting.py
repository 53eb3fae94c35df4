"""Check whether the model can overfit one batch, and compare its first loss with that of guessing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from tensortap import text
from tensortap.adapters.torch.model_check.subject import (
    CheckedModel,
    NotApplicableError,
    main_output,
    user_code,
)
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.finding import Finding

_RATES: Final = (1e-2, 1e-3, 1e-1)
_ENOUGH: Final = 0.5  # share of the first loss below which overfitting counts as successful
_SLOW: Final = 0.9
_NONE: Final = 0.98
_FEWEST: Final = 8  # steps, to say anything
_EPS: Final = 1e-8


class Fit:
    """A few steps of Adam on one batch, by hand: an optimizer of PyTorch would call the hooks of others."""

    def __init__(self, subject: CheckedModel, rate: float) -> None:
        self._subject = subject
        self._rate = rate
        self.losses: list[float] = []
        self.reached: set[str] = set()  # parameters that got a gradient
        self.moved: set[str] = set()  # and one that was not zero

    def run(self, steps: int, seconds: float) -> None:
        """Train from the first state, for this many steps or seconds."""
        subject = self._subject
        subject.restore()
        subject.model.train()
        moments: dict[str, tuple[Tensor, Tensor]] = {}
        end = time.monotonic() + seconds
        for step in range(1, steps + 1):
            loss = self._backward()
            self.losses.append(loss)
            if not math.isfinite(loss) or (time.monotonic() > end and step < steps):
                break
            self._update(moments, step)
        subject.restore()

    def _backward(self) -> float:
        subject = self._subject
        for parameter in subject.model.parameters():
            parameter.grad = None
        with torch.enable_grad():
            output = subject.call()
            try:
                loss = subject.loss(output)
            except NotApplicableError:
                loss = _projection(output)
            if not loss.requires_grad:
                raise NotApplicableError("the loss depends on no parameter")
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    @torch.no_grad()
    def _update(self, moments: dict[str, tuple[Tensor, Tensor]], step: int) -> None:
        for name, parameter in self._subject.model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            self.reached.add(name)
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            if name not in self.moved and bool(gradient.any()):
                self.moved.add(name)
            first, second = moments.setdefault(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.01)
            size = (second / (1 - 0.99**step)).sqrt() + _EPS
            parameter.sub_(self._rate * (first / (1 - 0.9**step)) / size)


def _projection(output: Any) -> Tensor:
    """Return a number that every element of every output changes, where there is no loss."""
    generator = torch.Generator().manual_seed(0)
    found = [t for _, t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
    if not found:
        raise NotApplicableError("no output depends on a parameter")
    weights = [torch.rand(t.shape, generator=generator).to(t.device, t.dtype) + 0.5 for t in found]
    return torch.stack([(t * w).float().mean() for t, w in zip(found, weights, strict=True)]).sum()


def cannot_overfit(subject: CheckedModel) -> Iterator[Finding]:
    """Train on the one batch, at several rates, and check whether the loss falls."""
    subject.loss(subject.output(training=True, gradients=True))  # no loss, no question
    first, best, steps = _best(subject)
    if best <= _SLOW * first if first > 0 else best < first:
        return
    evidence = {"first": first, "best": best, "steps": steps}
    said = f"{steps} steps on one batch took the loss from {text.number(first)} to {text.number(best)}"
    if not math.isfinite(first):
        yield _finding(
            subject, "error", f"The loss is {first} at the first step.", "See tt.locate_nonfinite.", evidence
        )
    elif best > _NONE * first and abs(first) > 1e-6:
        yield _finding(subject, "warning", f"{said}: it does not learn even one batch by heart.",
                       "Do outputs, loss and targets fit? Do gradients reach the parameters?", evidence)  # fmt: skip
    else:
        yield _finding(subject, "info", f"{said}.", "Give more steps=, to see whether it can overfit.", evidence)


def _best(subject: CheckedModel) -> tuple[float, float, int]:
    first, best, steps = math.nan, math.inf, 0
    for rate in _RATES:
        fit = Fit(subject, rate)
        fit.run(subject.question.steps, subject.question.seconds / len(_RATES))
        first = fit.losses[0]
        end = _end(fit.losses)
        best, steps = min(best, end), max(steps, len(fit.losses))
        if not math.isfinite(first) or best < _ENOUGH * first:
            break
    if steps < _FEWEST and math.isfinite(first) and best > _SLOW * first:
        raise NotApplicableError(f"only {steps} steps could be done in {subject.question.seconds:.0f} s; give seconds=")
    return first, best, steps


def _end(losses: list[float]) -> float:
    last = losses[-3:]
    return sum(last) / len(last) if all(map(math.isfinite, last)) else math.inf


def _finding(subject: CheckedModel, severity: Any, message: str, advice: str, evidence: dict[str, Any]) -> Finding:
    code = user_code(subject.model, "")
    return Finding("cannot_overfit", severity, "", None, evidence, message, advice=advice, code=code)


def initial_loss(subject: CheckedModel) -> Iterator[Finding]:
    """Compare the first loss with that of guessing, where the loss is a known one."""
    output = subject.output()
    value = float(subject.loss(output))
    known = _chance(subject, main_output(output).double(), value)
    if known is None:
        raise NotApplicableError(
            "the loss must be cross entropy, binary cross entropy or mean squared error to know what guessing gives"
        )
    kind, chance, most = known
    if value > most:
        yield Finding("initial_loss", "warning" if kind != "mean squared error" else "info", "", None,
                      {"loss": value, "chance": chance}, f"The {kind} begins at {text.number(value)}; guessing gives "
                      f"{text.number(chance)}.",
                      advice="Outputs are too large at the start: smaller initial weights in the last layer, or "
                      "normalise before it; or the targets are not what the outputs mean.",
                      code=user_code(subject.model, ""))  # fmt: skip


def _chance(subject: CheckedModel, output: Tensor, value: float) -> tuple[str, float, float] | None:
    for target in _targets(subject):
        if not target.is_floating_point():
            for logits, wanted in _arrangements(output, target):
                if _close(torch.nn.functional.cross_entropy(logits, wanted), value):
                    chance = math.log(logits.shape[1])
                    return "cross entropy", chance, 2 * chance + 0.5
        elif target.shape == output.shape:
            wanted = target.double()
            binary = bool(((wanted == 0) | (wanted == 1)).all())
            if binary and _close(torch.nn.functional.binary_cross_entropy_with_logits(output, wanted), value):
                return "binary cross entropy", math.log(2), 3 * math.log(2)
            if _close(torch.nn.functional.mse_loss(output, wanted), value):
                chance = float(wanted.var(correction=0))
                return "mean squared error", chance, 10 * chance
    return None


def _targets(subject: CheckedModel) -> list[Tensor]:
    if subject.question.target is not None:
        return [t for _, t in tensors_in(subject.question.target)]
    return [t for slot, t in subject.given.items() if "label" in slot or "target" in slot]


def _arrangements(output: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the ways in which a cross entropy may take outputs and classes: classes on axis 1, or last, or shifted."""
    if target.dtype == torch.bool or output.dim() < 2:
        return
    if output.shape[1] > 1 and (output.shape[0], *output.shape[2:]) == tuple(target.shape):
        yield from _within(output, target.long())
    if output.shape[:-1] == target.shape:
        yield from _within(output.flatten(0, -2), target.long().flatten())
        if target.dim() == 2 and target.shape[1] > 1:
            yield from _within(output[:, :-1].flatten(0, -2), target[:, 1:].long().flatten())


def _within(logits: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    kept = target[target != -100]
    if kept.numel() and int(kept.min()) >= 0 and int(kept.max()) < logits.shape[1] > 1:
        yield logits, target


def _close(loss: Tensor, value: float) -> bool:
    return math.isclose(float(loss), value, rel_tol=1e-3, abs_tol=1e-6)
