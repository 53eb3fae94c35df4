"""Check whether output and target fit: the loss accepts them, and it depends on which target belongs to which
sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from tensortap.adapters.torch.model_check.subject import CheckedModel, NotApplicableError, main_output
from tensortap.finding import Finding

RULE: Final = "targets_unpaired"


def targets_unpaired(subject: CheckedModel) -> Iterator[Finding]:
    """Give each sample the target of another one: the loss has to change."""
    target = subject.question.target
    if subject.question.loss is None or target is None:
        raise NotApplicableError("the model computes its own loss, or none; give loss= and target=")
    output = subject.output()
    try:
        subject.loss(output)
    except NotApplicableError:
        raise
    except Exception as error:
        yield _refused(output, target, error)
        return
    if not isinstance(target, Tensor) or target.dim() == 0 or not isinstance(output, Tensor):
        raise NotApplicableError("output or target is more than one tensor")
    yield from _unpaired(subject, _spread(output), target)


def _refused(output: Any, target: Any, error: Exception) -> Finding:
    shapes = _shapes(output, target)
    return Finding(RULE, "error", "", None, shapes, f"The loss refuses outputs of {shapes['output']} with targets of "
                   f"{shapes['target']}: {type(error).__name__}: {error}"[:400], _advice(output, target))  # fmt: skip


def _advice(output: Any, target: Any) -> str:
    if isinstance(target, Tensor) and isinstance(output, Tensor) and not target.is_floating_point() and target.numel():
        low, high = int(target.min()), int(target.max())
        classes = output.shape[1] if output.dim() > 1 else 0
        if classes and (high >= classes or low < 0):
            return f"Targets are {low} to {high}, outputs have {classes} classes: give the last layer {high + 1}."
    return "Give output and target the shapes and dtypes that the loss documents."


def _shapes(output: Any, target: Any) -> dict[str, Any]:
    first = output if isinstance(output, Tensor) else main_output(output)
    return {
        "output": f"{list(first.shape)} {_dtype(first)}",
        "target": f"{list(target.shape)} {_dtype(target)}" if isinstance(target, Tensor) else type(target).__name__,
    }


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _spread(output: Tensor) -> Tensor:
    """Return outputs that differ from sample to sample, within their former range: equal ones would tell nothing."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(output.shape, generator=generator).to(output.device, output.dtype)
    low, high = output.aminmax()
    return low + (high - low) * noise if bool(high > low) else output + 0.01 * noise


def _unpaired(subject: CheckedModel, output: Tensor, target: Tensor) -> Iterator[Finding]:
    other = target.roll(1, 0)
    if torch.equal(other, target) or target.shape[0] < 2:
        raise NotApplicableError("all samples have the same target")
    with torch.no_grad():
        own, exchanged = float(subject.loss(output, target)), float(subject.loss(output, other))
    if abs(own - exchanged) > 1e-6 * max(abs(own), 1e-12):
        return
    shapes = _shapes(output, target)
    if output.shape != target.shape and output.numel() % target.numel() == 0 == target.numel() % output.numel():
        yield Finding(RULE, "error", "", None, shapes, f"The loss does not change when samples exchange their targets: "
                      f"{shapes['output']} and {shapes['target']} broadcast, and every output meets every target.",
                      "Give both one shape: target.unsqueeze(1), or output.squeeze(1).")  # fmt: skip
    else:
        yield Finding(RULE, "info", "", None, shapes, "The loss does not change when samples exchange their targets.",
                      "Right for a loss that compares distributions; else look at what it does with them.")  # fmt: skip
