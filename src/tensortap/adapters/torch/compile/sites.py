"""What the operations in a compiled graph do when they run: the same as the hooks of eager mode, where data flows."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from tensortap.adapters.protocol import Port
from tensortap.adapters.torch.autograd.gradients import (
    InputEdges,
    Steps,
    await_inputs,
    await_outputs,
    backward_task,
    count_call,
)
from tensortap.adapters.torch.compile.operators import Found, Regions, Target
from tensortap.adapters.torch.modules.tensors import TensorObserver
from tensortap.record.recorder import OpenStep

_EDGES: Final = InputEdges()


class Site(Target):
    """The ports of one kind of one module: sees tensors that pass."""

    __slots__ = ("bits", "observer", "ports", "steps")

    def __init__(self, observer: TensorObserver, steps: Steps, ports: list[Port], regions: Regions) -> None:
        super().__init__(regions)
        self.observer = observer
        self.steps = steps
        self.ports = ports
        self.bits = 0
        for port in ports:
            self.bits |= port.bits

    def see(self, tensor: Tensor, slot: str) -> None:
        """Record it under every name the module has."""
        step = self.open_step()
        if step is not None:
            for port in self.ports:
                self.observer.take(port.points.get(slot) or port.point(slot), tensor, step, backward_task() != -1)

    def told(self, note: str, slots: list[str]) -> None:
        """There was no tensor, or no gradient will come: the reason."""
        for port in self.ports:
            port.note = note

    def failed(self, error: Exception) -> None:
        """Count it; the user's step goes on."""
        where = ", ".join(f"{port.path}:{port.port}" for port in self.ports)
        self.observer.recorder.counters.failed("skipped_tensors", f"observing {where} in compiled code", error)

    def open_step(self) -> OpenStep | None:
        """The step that what is seen now belongs to, if it is observed."""
        steps = self.steps
        step = steps.current() if steps.spread else self.observer.recorder.current
        return step if step.armed & self.bits else None


class GradientSite(Site):
    """Sees gradients. Backward takes calls in the opposite order, so the last call that forward told of comes first."""

    __slots__ = ()

    def see(self, tensor: Tensor, slot: str) -> None:
        """Record it as the gradient of the call that it belongs to."""
        step = self.open_step()
        if step is None:
            return
        waiting = step.calls.get((self, slot))
        call = waiting.pop() if waiting else -1
        for port in self.ports:
            row = self.observer.take(port.points.get(slot) or port.point(slot), tensor, step)
            if row >= 0 and call >= 0:
                step.table.columns["call"][row] = call

    def told(self, note: str, slots: list[str]) -> None:
        """Forward ran, and backward may bring gradients of these."""
        step = self.open_step()
        if step is None:
            return
        super().told(note, slots)
        call = count_call(step, self, backward_task() != -1)
        for slot in slots:
            step.calls.setdefault((self, slot), []).append(call)

    def expect(self, found: Found) -> None:
        """As in eager mode."""
        step = self.open_step()
        if step is not None:
            call = count_call(step, self, backward_task() != -1)
            await_outputs(self.observer, self.steps, self.ports, found, step, call)

    def enter(self, given: Found) -> None:
        """As in eager mode."""
        if self.open_step() is not None:
            _EDGES.note(self, given)

    def leave(self, outs: list[Tensor]) -> None:
        """As in eager mode."""
        noted, step = _EDGES.recall(self), self.open_step()
        if noted is not None and step is not None:
            call = count_call(step, self, backward_task() != -1)
            found = [("", tensor) for tensor in outs]
            await_inputs(self.observer, self.steps, self.ports, noted, found, step, call)
