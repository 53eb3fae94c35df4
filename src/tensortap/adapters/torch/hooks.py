"""The hooks that sit on modules and tensors. They return nothing, keep no tensor, and never raise into the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.adapters.base import Port
from tensortap.adapters.torch.inputs import InputGradients
from tensortap.adapters.torch.tensors import Taker
from tensortap.adapters.torch.walk import inputs_in, tensors_in
from tensortap.recorder import OpenStep, Point

Steps = Callable[[], OpenStep]


def inert(*args: Any) -> None:
    """What a copied or pickled model carries in place of a live hook: nothing happens."""


class Hook:
    """Copies and pickles of a watched model must work, and carry no tap away."""

    __slots__ = ()

    def __reduce__(self) -> str | tuple[Any, ...]:
        return (_inert_hook, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert


def _inert_hook() -> Callable[..., None]:
    return inert


class ForwardHook(Hook):
    """Sees what one module takes and returns, under every name the module has."""

    __slots__ = ("bits", "grad_inputs", "grad_outputs", "inputs", "outputs", "steps", "taker")

    def __init__(self, taker: Taker, steps: Steps, ports: Mapping[str, list[Port]]) -> None:
        self.taker = taker
        self.steps = steps
        self.outputs = ports.get("output", [])
        self.inputs = ports.get("input", [])
        self.grad_outputs = ports.get("grad_output", [])
        self.grad_inputs = ports.get("grad_input", [])
        self.bits = 0
        for group in ports.values():
            for port in group:
                self.bits |= port.bits

    def ports(self) -> list[Port]:
        """All ports it serves."""
        return [*self.outputs, *self.inputs, *self.grad_outputs, *self.grad_inputs]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After the module's forward."""
        if torch.compiler.is_compiling():
            return
        step = self.steps()
        if not step.armed & self.bits:
            return
        try:
            self._see(step, module, args, kwargs, output)
        except Exception as error:
            self.taker.recorder.ledger.failed("skipped_tensors", f"observing a {type(module).__name__}", error)

    def _see(
        self, step: OpenStep, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        recomputed = torch._C._current_graph_task_id() != -1
        if self.inputs:
            given = inputs_in(module.forward, args, kwargs)
            for port in self.inputs:
                for slot, tensor in given:
                    self.taker.take(port.point(slot), tensor, step, recomputed)
        if self.outputs:
            for port in self.outputs:
                if type(output) is Tensor:
                    self.taker.take(port.point(""), output, step, recomputed)
                else:
                    for slot, tensor in tensors_in(output):
                        self.taker.take(port.point(slot), tensor, step, recomputed)
        if self.grad_outputs and torch.is_grad_enabled():
            self._await_output_gradients(step, output)
        if self.grad_inputs and torch.is_grad_enabled():
            given = inputs_in(module.forward, args, kwargs)
            InputGradients.await_(self.taker, self.steps, self.grad_inputs, given, output)

    def _await_output_gradients(self, step: OpenStep, output: Any) -> None:
        for port in self.grad_outputs:
            if step.armed & port.bits:
                for slot, tensor in tensors_in(output):
                    await_gradient(self.taker, self.steps, port.point(slot), tensor)


class GradientHook(Hook):
    """Sees the gradient that arrives at one tensor."""

    __slots__ = ("handle", "point", "steps", "taker")

    def __init__(self, taker: Taker, steps: Steps, point: Point) -> None:
        self.taker = taker
        self.steps = steps
        self.point = point
        self.handle: Any = None

    def __call__(self, gradient: Tensor | None) -> None:
        """During backward. A leaf's hook would stay on it for ever, so it takes itself off."""
        if self.handle is not None:
            self.handle.remove()
        if gradient is not None:
            self.taker.take(self.point, gradient, self.steps())


def await_gradient(taker: Taker, steps: Steps, point: Point, tensor: Tensor) -> None:
    """Record the gradient of a tensor when backward reaches it."""
    if not tensor.requires_grad:
        return
    hook = GradientHook(taker, steps, point)
    handle = tensor.register_hook(hook)
    if tensor.is_leaf:
        hook.handle = handle
