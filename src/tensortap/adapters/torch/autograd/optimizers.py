"""Hooks on every optimizer's step: first the step detector is told, then parameters are recorded."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tensortap.adapters.torch.autograd.parameters import ParameterTaps, ids_of
from tensortap.adapters.torch.steps import TorchStepDetector


class OptimizerHooks:
    """Pass the steps of optimizers that own one of the model's parameters on to the detector and the taps.

    The hooks are global, so that no reference to the user's optimizer is needed. An optimizer that steps inside another
    which holds the same parameters, as ZeroRedundancyOptimizer's does, is a part of that one's step.
    """

    def __init__(self, steps: TorchStepDetector, parameters: ParameterTaps) -> None:
        self._steps = steps
        self._parameters = parameters
        self._stepping: weakref.ref[Any] | None = None
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def started(self, optimizer: Any) -> None:
        """Note a step with a closure that had begun when the hooks were made, and has changed nothing yet."""
        if self._owns(optimizer):
            self._begin(optimizer, closure=True)

    def _begin(self, optimizer: Any, closure: Any) -> None:
        self._stepping = weakref.ref(optimizer)
        self._steps.optimizer_starts(optimizer, closure)
        self._parameters.before_step(optimizer, closure)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if self._owns(optimizer) and not self._is_inside(optimizer):
                self._begin(optimizer, closure_of(args, kwargs))
        except Exception as error:
            self._failed(error)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if self._owns(optimizer) and not self._is_inside(optimizer):
                self._stepping = None
                self._parameters.after_step(optimizer, closure_of(args, kwargs))
                self._steps.optimizer_stepped(optimizer)
        except Exception as error:
            self._failed(error)

    def _owns(self, optimizer: Any) -> bool:
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = self._parameters.owns(optimizer)
        return known

    def _is_inside(self, optimizer: Any) -> bool:
        outer = self._stepping() if self._stepping is not None else None
        return outer is not None and outer is not optimizer and ids_of(optimizer) <= ids_of(outer)

    def _failed(self, error: Exception) -> None:
        self._steps.recorder.counters.failed("skipped_tensors", "observing an optimizer's step", error)


def closure_of(args: Any, kwargs: Any) -> Any:
    """Return the closure that `optimizer.step` was given, if any, from the arguments of a hook."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)
