"""Hooks on modules. They return nothing, keep no tensor, and never raise into the model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tensortap.adapters.plan import Port, bits_of
from tensortap.adapters.torch.autograd.gradients import (
    CallStack,
    GradientPlace,
    NodeHook,
    StepSource,
    await_input_gradients,
    await_output_gradients,
    backward_task,
    count_call,
)
from tensortap.adapters.torch.compile import backward as compiled_backward
from tensortap.adapters.torch.compile import code as compiled_code
from tensortap.adapters.torch.compile import operators as compiled
from tensortap.adapters.torch.compile.operators import CompileStatus, is_exporting
from tensortap.adapters.torch.compile.receivers import NOT_ENTERED, GradientReceiver, PortReceiver
from tensortap.adapters.torch.modules.hidden import HiddenEntry
from tensortap.adapters.torch.modules.nested import (
    inputs_by,
    inputs_in,
    object_inputs_in,
    objects_in_containers,
    tensors_in,
    tensors_in_containers,
)
from tensortap.adapters.torch.modules.tensors import (
    ARGUMENTS,
    OUTPUT,
    TensorObserver,
    answered_in_c,
    use_point,
    without_torch_function,
)
from tensortap.record.recorder import OpenStep, Point
from tensortap.reduce import kernel as kernels

is_tracing: Final = torch._C._is_tracing  # torch.jit.trace would record the operations that a hook calls on a tensor
_NOTHING: Final[Mapping[str, Any]] = {}
NO_TENSOR_OUT: Final = "returned no tensor"
NO_TENSOR_IN: Final = "was given no tensor"


class Hook(HiddenEntry):
    """Base of all hooks on modules. A copy or a pickle of a watched model has none of them (`hidden`).

    The compiler traces a hook as part of the module's call and finds our operators in it. A hook that it runs outside
    the graph (those of a compiled module itself) must not be compiled at all.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Keep the compiler from compiling hooks that run outside a graph."""
        if "__call__" in vars(cls):
            compiled_code.skip_compiling(vars(cls)["__call__"])

    def __reduce__(self) -> str | tuple[Any, ...]:
        # Only code that copies PyTorch's dicts by hand gets here: a callable that does nothing and needs no tensortap.
        return (getattr, (contextlib.nullcontext(), "__exit__"))


@answered_in_c
class OutputHook(Hook, kernels.NativeHook):
    """Record the output of a module. Most modules have only this hook, so it does as little as possible."""

    __slots__ = ("bits", "handle", "observer", "plain", "port", "receiver", "steps")

    def __init__(self, observer: TensorObserver, steps: StepSource, port: Port, compile_status: CompileStatus) -> None:
        self.observer = observer
        self.steps = steps
        self.port = port
        self.bits = port.bits
        self.plain: Point | None = None
        self.receiver = PortReceiver(observer, steps, [port], compile_status)
        self.handle = self.receiver.handle
        self.connect(observer.reader(steps), OutputHook.__call__, OUTPUT)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the output, where C has not."""
        if is_compiling():
            _observe_compiled(self.handle, list(tensors_in_containers(output)), NO_TENSOR_OUT, output)
            return
        if is_tracing():
            return
        steps, observer = self.steps, self.observer
        step = steps.current() if observer.recorder.per_thread else observer.recorder.current
        if not step.armed & self.bits:
            return
        if type(output) is Tensor:
            observer.take(self.plain or self._plain(), output, step, backward_task() != -1)
            return
        try:
            _take_all(observer, [self.port], tensors_in(output, observer.not_entered), step, backward_task() != -1)
        except Exception as error:
            _failed(observer, f"looking into a {type(output).__name__}", error)

    def _plain(self) -> Point:
        self.plain = point = self.port.point("")
        use_point(self, point)
        return point


@answered_in_c
class ForwardPreHook(Hook, kernels.NativeHook):
    """Record the inputs of a module, before an in-place forward can change them."""

    __slots__ = (
        "alone",
        "bits",
        "calls",
        "grad_inputs",
        "gradient_handle",
        "handle",
        "inputs",
        "names",
        "observer",
        "receivers",
        "steps",
    )

    def __init__(
        self,
        observer: TensorObserver,
        steps: StepSource,
        ports: Mapping[str, list[Port]],
        calls: CallStack,
        compile_status: CompileStatus,
    ) -> None:
        self.observer = observer
        self.steps = steps
        self.calls = calls
        self.inputs = ports.get("input", [])
        self.grad_inputs = ports.get("grad_input", [])
        self.bits = bits_of([*self.inputs, *self.grad_inputs])
        self.names: tuple[str, ...] = ()  # names of forward's parameters: the compiler could not look them up
        self.receivers = (
            PortReceiver(observer, steps, self.inputs, compile_status),
            GradientReceiver(observer, steps, self.grad_inputs, compile_status),
        )
        self.handle, self.gradient_handle = (receiver.handle if receiver.ports else None for receiver in self.receivers)
        self.alone = len(self.inputs) == 1 and not self.grad_inputs
        self.connect(observer.reader(steps) if self.alone else None, ForwardPreHook.__call__, ARGUMENTS)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NOTHING) -> None:
        """Record the inputs. A hook removed while the call begins is called once more, without kwargs."""
        if is_compiling():
            self._compiled(args, kwargs)
            return
        if is_tracing():
            return
        step = self.steps.current()
        if not step.armed & self.bits:
            return
        try:
            self.observer.given_objects.begin(step)
            given = inputs_in(module.forward, args, kwargs)
            given += object_inputs_in(module.forward, args, kwargs, self.observer.given_objects)
            recomputed = backward_task() != -1
            for port in self.inputs:
                if not given:
                    port.note = NO_TENSOR_IN
                for slot, tensor in given:
                    self.observer.take(point := port.point(slot), tensor, step, recomputed)
                    if self.alone and not slot:
                        use_point(self, point)
            if self.grad_inputs:
                with without_torch_function():
                    self.calls.push(self, given)
        except Exception as error:
            _failed(self.observer, f"observing the input of a {type(module).__name__}", error)

    def _compiled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = inputs_by(self.names, args, kwargs)
        _observe_compiled(self.handle, given, NO_TENSOR_IN, (args, kwargs))
        if self.gradient_handle is not None and not is_exporting():
            compiled_backward.begin_call(self.gradient_handle, given)


@answered_in_c
class ForwardHook(Hook, kernels.NativeHook):
    """Record the output of a module, under every name it has, and register for its gradients."""

    __slots__ = (
        "before",
        "bits",
        "for_c",
        "grad_outputs",
        "gradient_handle",
        "handle",
        "input_gradient_handle",
        "observer",
        "outputs",
        "receivers",
        "steps"
    )  # fmt: skip

    def __init__(
        self, observer: TensorObserver, steps: StepSource, ports: Mapping[str, list[Port]], before: ForwardPreHook
    ) -> None:
        self.observer = observer
        self.steps = steps
        self.before = before if before.grad_inputs else None
        self.outputs = ports.get("output", [])
        self.grad_outputs = ports.get("grad_output", [])
        self.bits = bits_of([port for group in ports.values() for port in group])
        compile_status = before.receivers[0].compile_status
        self.receivers = (
            PortReceiver(observer, steps, self.outputs, compile_status),
            GradientReceiver(observer, steps, self.grad_outputs, compile_status),
        )
        self.handle, self.gradient_handle = (receiver.handle if receiver.ports else None for receiver in self.receivers)
        self.input_gradient_handle = before.gradient_handle
        # C serves one name and its output's gradient, from the first gradient on.
        self.for_c = not before.grad_inputs and len(self.outputs) <= 1 and len(self.grad_outputs) == 1
        self.connect(observer.reader(steps) if self.for_c else None, ForwardHook.__call__, OUTPUT)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the output where C has not. Called after a failed forward too, where input gradients are wanted."""
        if is_compiling():
            self._compiled(output)
            return
        if is_tracing():
            return
        inputs = self.before and self.before.calls.pop(self.before)
        steps, observer = self.steps, self.observer
        step = steps.current() if observer.recorder.per_thread else observer.recorder.current
        if not step.armed & self.bits:
            return
        try:
            recomputed = backward_task() != -1
            found = [("", output)] if type(output) is Tensor else tensors_in(output, observer.not_entered)
            _take_all(observer, self.outputs, found, step, recomputed)
            if self.grad_outputs or inputs:
                call = count_call(step, self, recomputed)
                with without_torch_function():
                    await_output_gradients(observer, steps, self.grad_outputs, found, step, call)
                    if inputs and self.before:
                        await_input_gradients(observer, steps, self.before.grad_inputs, inputs, found, step, call)
            if self.for_c:
                self._use_c()
        except Exception as error:
            _failed(observer, f"observing a {type(module).__name__}", error)

    def _use_c(self) -> None:
        """Have C do the same from now on, once the output and its gradient have points."""
        point = self.outputs[0].points.get("") if self.outputs else None
        gradients = self.grad_outputs[0]
        for_node = NodeHook.for_copies(GradientPlace(self.observer, self.steps, gradients, ""))
        if for_node is None or (self.outputs and point is None):
            return
        if point is not None:
            use_point(self, point)
        self.await_gradients(for_node, gradients.bits)
        self.for_c = False

    def take_output(self, output: Tensor, step: OpenStep) -> None:
        """Record an output that C leaves to Python, and nothing else."""
        for port in self.outputs:
            self.observer.take(port.point(""), output, step)

    def await_gradient(self, output: Tensor, step: OpenStep, call: int) -> None:
        """Register for a gradient for which C could not."""
        try:
            await_output_gradients(self.observer, self.steps, self.grad_outputs, [("", output)], step, call)
        except Exception as error:
            _failed(self.observer, "awaiting the gradient of an output", error)

    def _compiled(self, output: Any) -> None:
        found = list(tensors_in_containers(output))
        _observe_compiled(self.handle, found, NO_TENSOR_OUT, output)
        if is_exporting():
            return
        if self.gradient_handle is not None:
            compiled_backward.await_gradients(self.gradient_handle, found)
        if self.input_gradient_handle is not None:
            compiled_backward.end_call(self.input_gradient_handle, found)


def _observe_compiled(handle: Tensor | None, found: list[tuple[str, Tensor]], otherwise: str, value: Any) -> None:
    """Put operators into the graph: for every tensor found in a value, and for the objects that were not entered.

    An exported program leaves this process, so it gets none.
    """
    if handle is None or is_exporting():
        return
    if found:
        compiled.observe(handle, found)
    else:
        compiled.notify(handle, otherwise)
    for name in objects_in_containers(value):
        compiled.notify(handle, NOT_ENTERED + name)


def _take_all(
    observer: TensorObserver, ports: list[Port], found: list[tuple[str, Tensor]], step: OpenStep, recomputed: bool
) -> None:
    for port in ports:
        if not found:
            port.note = NO_TENSOR_OUT
        for slot, tensor in found:
            observer.take(port.points.get(slot) or port.point(slot), tensor, step, recomputed)


def _failed(observer: TensorObserver, what: str, error: Exception) -> None:
    counters = observer.recorder.counters
    if counters.strict:
        raise error
    counters.failed("skipped_tensors", what, error)
