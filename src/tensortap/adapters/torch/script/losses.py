"""The loss of a step of a script: the tensors that backward is called on, or the results of loss modules."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.adapters.torch.device.operations import floats_on
from tensortap.adapters.torch.modules.hooks import Hook


class Losses:
    """Collect the losses of a step without waiting for a device; they are read when the step closes.

    What backward was called on is added up: over micro-batches and over several losses, that is what the optimizer
    sees the gradient of. A GradScaler's factor is in it. Without backward it is the mean of what loss modules
    returned.
    """

    def __init__(self) -> None:
        self._backward: list[Tensor] = []
        self._measured: list[Tensor] = []
        self._closure: int | None = None  # how many losses there were when the optimizer began to call a closure

    def backward_of(self, tensors: Any) -> None:
        """Add the tensors that backward is called on; in an optimizer's closure, only in its first evaluation."""
        if self._closure != -1:
            self._backward += _scalars(tensors)

    def optimizer_begins(self) -> None:
        """Note that an optimizer with a closure begins its step: the closure computes the same loss several times."""
        self._closure = len(self._backward)

    def optimizer_stepped(self) -> None:
        """Note that the optimizer is done."""
        self._closure = None

    def model_called(self) -> None:
        """Note that a model is called: in a closure, after a loss, its next evaluation begins."""
        if self._closure is not None and len(self._backward) > self._closure:
            self._closure = -1

    def measured(self, output: Any) -> None:
        """Add the result of a loss module."""
        self._measured += _scalars(output)

    def take(self) -> Tensor | None:
        """Return the step's loss, if it has one, on the device it was computed on, and reset."""
        summed, averaged = self._backward, self._measured
        self._backward, self._measured = [], []
        self._closure = None if self._closure is None else 0
        if summed:
            return _sum(summed)
        return _sum(averaged) / len(averaged) if averaged else None


class LossModuleHook(Hook):
    """Collect what a loss module returns while no gradient is computed."""

    __slots__ = ("losses",)

    def __init__(self, losses: Losses) -> None:
        self.losses = losses

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Run after the module's forward."""
        if isinstance(output, Tensor) and not output.requires_grad:
            self.losses.measured(output)


def _sum(tensors: list[Tensor]) -> Tensor:
    """Add on the device of the first, in the widest floats that the device has."""
    device = tensors[0].device
    wide = [t.to(device, floats_on(device), non_blocking=device.type != "cpu").reshape(()) for t in tensors]
    return torch.stack(wide).sum()


def _scalars(tensors: Any) -> list[Tensor]:
    """Return copies of the single numbers among tensors: the script may change them later."""
    given = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    with contextlib.suppress(Exception), torch.no_grad():
        return [t.detach().clone() for t in given if isinstance(t, Tensor) and t.numel() == 1 and t.is_floating_point()]
    return []
