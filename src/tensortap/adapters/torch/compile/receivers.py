"""Receive what the operators in a compiled graph see, and record it as the hooks of eager mode do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor
from torch.compiler import is_compiling

from tensortap.adapters.plan import Port
from tensortap.adapters.torch.autograd.gradients import (
    CallStack,
    StepSource,
    await_input_gradients,
    await_output_gradients,
    backward_task,
    count_call,
)
from tensortap.adapters.torch.compile import operators
from tensortap.adapters.torch.compile.operators import CompileStatus, Found, GraphReceiver, is_exporting
from tensortap.adapters.torch.modules.tensors import TensorObserver
from tensortap.record.recorder import OpenStep

NOT_ENTERED: Final = "not entered: "  # begins a message that names a class
_CALLS: Final = CallStack()


class PortReceiver(GraphReceiver):
    """Record tensors for the ports of one kind of one module."""

    __slots__ = ("bits", "observer", "ports", "steps")

    def __init__(
        self, observer: TensorObserver, steps: StepSource, ports: list[Port], compile_status: CompileStatus
    ) -> None:
        super().__init__(compile_status)
        self.observer = observer
        self.steps = steps
        self.ports = ports
        self.bits = 0
        for port in ports:
            self.bits |= port.bits

    def observe(self, tensor: Tensor, slot: str) -> None:
        """Record the tensor under every name the module has."""
        step = self.open_step()
        if step is not None:
            for port in self.ports:
                self.observer.take(port.points.get(slot) or port.point(slot), tensor, step, backward_task() != -1)

    def notified(self, note: str, slots: list[str]) -> None:
        """Note why there was no tensor, or why there will be no gradient; count objects that were not entered."""
        if note.startswith(NOT_ENTERED):
            if self.open_step() is not None:
                self.observer.not_entered_by_name(note.removeprefix(NOT_ENTERED))
            return
        for port in self.ports:
            port.note = note

    def failed(self, error: Exception) -> None:
        """Count the error; the user's step goes on."""
        where = ", ".join(f"{port.path}:{port.port}" for port in self.ports)
        self.observer.recorder.counters.failed("skipped_tensors", f"observing {where} in compiled code", error)

    def open_step(self) -> OpenStep | None:
        """Return the step that belongs to the running code, if it is observed."""
        recorder = self.observer.recorder
        step = self.steps.current() if recorder.per_thread else recorder.current
        return step if step.armed & self.bits else None


class GradientReceiver(PortReceiver):
    """Record gradients. Backward visits calls in reverse: the last call that forward reported comes first."""

    __slots__ = ()

    def observe(self, tensor: Tensor, slot: str) -> None:
        """Record the gradient with the number of the call that it belongs to."""
        step = self.open_step()
        if step is None:
            return
        waiting = step.calls.get((self, slot))
        call = waiting.pop() if waiting else -1
        for port in self.ports:
            row = self.observer.take(port.points.get(slot) or port.point(slot), tensor, step)
            if row >= 0 and call >= 0:
                step.table.columns["call"][row] = call

    def notified(self, note: str, slots: list[str]) -> None:
        """Note that forward ran, and that backward may bring gradients for these slots."""
        step = self.open_step()
        if step is None:
            return
        super().notified(note, slots)
        call = count_call(step, self, backward_task() != -1)
        for slot in slots:
            step.calls.setdefault((self, slot), []).append(call)

    def await_gradients(self, found: Found) -> None:
        """Register for the gradients as eager mode does."""
        step = self.open_step()
        if step is not None:
            call = count_call(step, self, backward_task() != -1)
            await_output_gradients(self.observer, self.steps, self.ports, found, step, call)

    def call_begins(self, given: Found) -> None:
        """Note the call's inputs as eager mode does."""
        if self.open_step() is not None:
            _CALLS.push(self, given)

    def call_ends(self, outs: list[Tensor]) -> None:
        """Register for the gradients of the call's inputs as eager mode does."""
        inputs, step = _CALLS.pop(self), self.open_step()
        if inputs is not None and step is not None:
            call = count_call(step, self, backward_task() != -1)
            found = [("", tensor) for tensor in outs]
            await_input_gradients(self.observer, self.steps, self.ports, inputs, found, step, call)


class CompiledNamedValues(GraphReceiver):
    """Pass named values to a function when compiled code runs, where no model is watched."""

    __slots__ = ("record",)

    def __init__(self, record: Callable[[Any, str], object]) -> None:
        super().__init__(CompileStatus())
        self.record = record

    def __call__(self, value: Any, name: str) -> bool:
        """Return whether the caller is being compiled; then an operator in the graph observes the value."""
        if not is_compiling():
            return False
        if isinstance(value, Tensor) and not is_exporting():
            operators.observe(self.handle, [(name, value)])
        return True

    def observe(self, tensor: Tensor, slot: str) -> None:
        """Pass the value on."""
        self.record(tensor.detach(), slot)
