"""Looking for the origin of a non-finite value while a model is watched, at the moment it appears."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.compiler import is_compiling

from tensortap.adapters.torch.autograd.gradients import backward_task
from tensortap.adapters.torch.distributed.shards import may_communicate
from tensortap.adapters.torch.modules.hooks import Hook
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.nonfinite.origin import explain, is_born_in
from tensortap.adapters.torch.steps import TorchStepDetector


class OriginHook(Hook):
    """Sits after a module's other hooks. It looks only when the step has seen a non-finite value, and once."""

    __slots__ = ("path", "steps")

    def __init__(self, path: str, steps: TorchStepDetector) -> None:
        self.path = path
        self.steps = steps

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After the module's forward: if it made the first non-finite value, run it again and look inside."""
        if is_compiling():
            return
        step = self.steps.current()
        if step.origin is not None or not step.table.nonfinite or backward_task() != -1:
            return
        # Other ranks do not run it again, so one that might wait for them is not run either; its record tells.
        if may_communicate(module, [tensor for _, tensor in tensors_in((args, kwargs))]):
            return
        if is_born_in((args, kwargs), output):
            step.origin = explain(self.path, module, args, kwargs)
