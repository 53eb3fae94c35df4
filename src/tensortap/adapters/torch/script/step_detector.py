"""Where the steps of a script end, judged by its calls of models, backward and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

_PATIENCE: Final = 1000


class ScriptStepDetector:
    """Tell before each call of a model whether the call begins a new step.

    Training: a step lasts until an optimizer has stepped, however many models are called however often before that
    (micro-batches, a generator and a discriminator, a teacher, a cell called for each word). Without an optimizer it
    lasts until backward has run. Otherwise a second call of the same model begins a new step.
    """

    def __init__(self) -> None:
        self._ever_stepped = False
        self._begin()

    def _begin(self) -> None:
        self.used = False
        self.train = False  # a module in training mode was called
        self._calls = 0
        self._called: set[int] = set()
        self._learning: set[int] = set()  # called in training mode and with gradients
        self._backward = False
        self._stepped = False

    def over(self, module: nn.Module, whole: int) -> bool:
        """Return whether a call of this module, part of the model with id `whole`, begins a new step."""
        if not self.used:
            return False
        again = not self._called.isdisjoint((id(module), whole))
        if self._stepped:
            return True
        if not self._learning:
            return again
        if not module.training and id(module) in self._learning:
            return True  # from training to evaluation
        if self._optimizer_expected():
            return False
        return again or self._backward

    def called(self, module: nn.Module) -> None:
        """Note a call of a model in the open step."""
        self.used = True
        self.train |= module.training
        self._calls += 1
        self._called.add(id(module))
        if module.training and torch.is_grad_enabled():
            self._learning.add(id(module))

    def backward_ran(self) -> None:
        """Note that gradients were computed."""
        self._backward = True

    def optimizer_stepped(self) -> None:
        """Note that an optimizer used them."""
        self._stepped = self._ever_stepped = True

    def closed(self) -> None:
        """Begin a new step."""
        self._begin()

    def _optimizer_expected(self) -> bool:
        return self._ever_stepped or (self._calls < _PATIENCE and _any_optimizer())


def _any_optimizer() -> bool:
    """Return whether an optimizer was ever made: PyTorch then wraps the `step` of its class."""
    return any(getattr(kind.step, "hooked", False) for kind in _kinds(torch.optim.Optimizer))


def _kinds(kind: type[torch.optim.Optimizer]) -> Iterator[type[torch.optim.Optimizer]]:
    for child in kind.__subclasses__():
        yield child
        yield from _kinds(child)
