"""Parameters, their final gradients and their updates, taken when the optimizer steps.

The optimizers' global hooks need no reference to the user's optimizer. What they show is what the optimizer uses:
accumulated over micro-batches, unscaled by a GradScaler, and clipped if the user clips.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tensortap.adapters.base import Port
from tensortap.adapters.torch.tensors import Taker
from tensortap.recorder import OpenStep
from tensortap.table import Value


class ParameterTaps:
    """Watches the parameters that probes want, and tells when an optimizer that owns one of ours has stepped."""

    def __init__(
        self,
        taker: Taker,
        steps: Callable[[], OpenStep],
        parameters: dict[str, nn.Parameter],
        ports: dict[str, list[Port]],
        stepped: Callable[[], None],
    ) -> None:
        self._taker = taker
        self._steps = steps
        self._stepped = stepped
        self._ours = weakref.WeakSet[Any]()
        self._named = {name: weakref.ref(p) for name, p in parameters.items()}
        self._ids = {id(p) for p in parameters.values()}
        self._ports = ports
        self._before: dict[str, Tensor] = {}
        self._taken: OpenStep | None = None
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._before.clear()

    def take_unstepped(self, step: OpenStep) -> None:
        """A step that ends without an optimizer: what the parameters and gradients are now."""
        if self._taken is not step:
            self._take(step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._owns(optimizer):
            return
        step = self._steps()
        if step.armed:
            self._take(step)
            self._remember(step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._owns(optimizer):
            if self._before:
                self._take_updates(self._steps())
            self._stepped()

    def _owns(self, optimizer: Any) -> bool:
        if optimizer in self._ours:
            return True
        if any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
            self._ours.add(optimizer)
            return True
        return False

    def _take(self, step: OpenStep) -> None:
        self._taken = step
        for port in self._wanted("param", step):
            parameter = self._named[port.path]()
            if parameter is not None:
                self._taker.take(port.point(""), parameter, step)
        for port in self._wanted("grad", step):
            parameter = self._named[port.path]()
            if parameter is not None and parameter.grad is not None:
                self._taker.take(port.point(""), parameter.grad, step)

    def _remember(self, step: OpenStep) -> None:
        for port in self._wanted("update", step):
            parameter = self._named[port.path]()
            if parameter is not None:
                self._before[port.path] = parameter.detach().clone()

    def _take_updates(self, step: OpenStep) -> None:
        """The change of each parameter, with its size relative to the parameter as `ratio`."""
        for port in self._wanted("update", step):
            parameter, old = self._named[port.path](), self._before.pop(port.path, None)
            if parameter is None or old is None:
                continue
            change = torch.sub(parameter.detach(), old)
            row = self._taker.take(port.point(""), change, step)
            if row >= 0:
                size, norm = float(step.table.columns["l2"][row]), float(torch.linalg.vector_norm(old))
                step.table.values.append(Value(row, "ratio", size / norm if norm else float("inf"), port.bits))
        self._before.clear()

    def _wanted(self, kind: str, step: OpenStep) -> list[Port]:
        return [port for port in self._ports.get(kind, ()) if step.armed & port.bits]
