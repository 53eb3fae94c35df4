"""The hooks that sit on modules. They return nothing, keep no tensor, and never raise into the model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tensortap.adapters.base import Port
from tensortap.adapters.torch.gradients import InputEdges, Steps, await_inputs, await_outputs
from tensortap.adapters.torch.tensors import Taker, aside
from tensortap.adapters.torch.walk import inputs_in, tensors_in
from tensortap.recorder import OpenStep, Point

backward_task: Final = torch._C._current_graph_task_id  # −1 outside backward: a forward inside it is a recomputation
tracing: Final = torch._C._get_tracing_state  # torch.jit.trace would record what we ask of a tensor
_NOTHING: Final[Mapping[str, Any]] = {}
NO_TENSOR_OUT: Final = "returned no tensor"
NO_TENSOR_IN: Final = "was given no tensor"


class Hook:
    """Copies and pickles of a watched model must work, and carry no tap away."""

    __slots__ = ()

    def __reduce__(self) -> str | tuple[Any, ...]:
        # A callable of the standard library that does nothing: the pickle opens where tensortap is not installed.
        return (getattr, (contextlib.nullcontext(), "__exit__"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Leftover:
        return Leftover()


class Leftover(Hook):
    """What a copied model has in place of a tap. The first call sweeps them all off, before anything else runs."""

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        """Before or after the copy's forward."""
        for part in module.modules():
            notes: list[dict[int, Any]] = [
                part._forward_pre_hooks_with_kwargs, part._forward_hooks_with_kwargs, part._forward_hooks_always_called
            ]  # fmt: skip
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                for key in [key for key, hook in hooks.items() if isinstance(hook, Leftover)]:
                    for entries in (hooks, *notes):
                        entries.pop(key, None)


class OutputHook(Hook):
    """Sees what a module returns: the hook that most modules carry, kept lean."""

    __slots__ = ("bits", "plain", "port", "steps", "taker")

    def __init__(self, taker: Taker, steps: Steps, port: Port) -> None:
        self.taker = taker
        self.steps = steps
        self.port = port
        self.bits = port.bits
        self.plain: Point | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the module's forward."""
        if is_compiling() or tracing():
            return
        steps, taker = self.steps, self.taker
        step = steps.current() if steps.spread else taker.recorder.current
        if not step.armed & self.bits:
            return
        if type(output) is Tensor:
            taker.take(self.plain or self._plain(), output, step, backward_task() != -1)
            return
        try:
            _take_all(taker, [self.port], list(tensors_in(output)), step, backward_task() != -1)
        except Exception as error:
            _failed(taker, f"looking into a {type(output).__name__}", error)

    def _plain(self) -> Point:
        self.plain = self.port.point("")
        return self.plain


class BeforeHook(Hook):
    """Sees what a module is given, before an in-place forward can change it."""

    __slots__ = ("bits", "edges", "grad_inputs", "inputs", "steps", "taker")

    def __init__(self, taker: Taker, steps: Steps, ports: Mapping[str, list[Port]], edges: InputEdges) -> None:
        self.taker = taker
        self.steps = steps
        self.edges = edges
        self.inputs = ports.get("input", [])
        self.grad_inputs = ports.get("grad_input", [])
        self.bits = _bits([*self.inputs, *self.grad_inputs])

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NOTHING) -> None:
        """Before the module's forward. One taken off while the call begins is called once more, without kwargs."""
        if is_compiling() or tracing():
            return
        step = self.steps.current()
        if not step.armed & self.bits:
            return
        try:
            given = inputs_in(module.forward, args, kwargs)
            recomputed = backward_task() != -1
            for port in self.inputs:
                if not given:
                    port.note = NO_TENSOR_IN
                for slot, tensor in given:
                    self.taker.take(port.point(slot), tensor, step, recomputed)
            if self.grad_inputs:
                with aside():
                    self.edges.note(self, given)
        except Exception as error:
            _failed(self.taker, f"observing the input of a {type(module).__name__}", error)


class AfterHook(Hook):
    """Sees what one module returns, under every name it has, and arranges for gradients."""

    __slots__ = ("before", "bits", "grad_outputs", "outputs", "steps", "taker")

    def __init__(
        self, taker: Taker, steps: Steps, ports: Mapping[str, list[Port]], before: BeforeHook | None = None
    ) -> None:
        self.taker = taker
        self.steps = steps
        self.before = before if before is not None and before.grad_inputs else None
        self.outputs = ports.get("output", [])
        self.grad_outputs = ports.get("grad_output", [])
        self.bits = _bits([port for group in ports.values() for port in group])

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the module's forward; after a failed one too, where something was noted before it."""
        if is_compiling() or tracing():
            return
        noted = self.before and self.before.edges.recall(self.before)
        steps, taker = self.steps, self.taker
        step = steps.current() if steps.spread else taker.recorder.current
        if not step.armed & self.bits:
            return
        try:
            recomputed = backward_task() != -1
            found = [("", output)] if type(output) is Tensor else list(tensors_in(output))
            _take_all(taker, self.outputs, found, step, recomputed)
            if self.grad_outputs or noted:
                call = count_call(step, self, recomputed)
                with aside():
                    await_outputs(taker, steps, self.grad_outputs, found, step, call)
                    if noted and self.before:
                        await_inputs(taker, steps, self.before.grad_inputs, noted, found, step, call)
        except Exception as error:
            _failed(taker, f"observing a {type(module).__name__}", error)


def count_call(step: OpenStep, what: object, recomputed: bool) -> int:
    """Which call in its step this is, and one more: gradients come in the opposite order."""
    key = (what, True) if recomputed else what
    call = step.calls.get(key, 0)
    step.calls[key] = call + 1
    return call


def _take_all(
    taker: Taker, ports: list[Port], found: list[tuple[str, Tensor]], step: OpenStep, recomputed: bool
) -> None:
    for port in ports:
        if not found:
            port.note = NO_TENSOR_OUT
        for slot, tensor in found:
            taker.take(port.points.get(slot) or port.point(slot), tensor, step, recomputed)


def _failed(taker: Taker, what: str, error: Exception) -> None:
    ledger = taker.recorder.ledger
    if ledger.strict:  # it was counted where it happened, or nobody will read the count
        raise error
    ledger.failed("skipped_tensors", what, error)


def _bits(ports: list[Port]) -> int:
    bits = 0
    for port in ports:
        bits |= port.bits
    return bits
