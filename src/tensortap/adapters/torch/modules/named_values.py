"""Values that the user names with `tensortap.tap(x, "my/value")`, and their gradients.

A name is known only when it is first used. A pattern that means a name must contain a slash (`"my/value"`,
`"my/value:grad_output"`, `"my/*"`); without one it would be taken for a misspelt module. `"**"` means named values too.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

from tensortap.adapters.plan import Plan, Port
from tensortap.adapters.torch.autograd.gradients import StepSource, await_output_gradients, backward_task, count_call
from tensortap.adapters.torch.compile import backward as compiled_backward
from tensortap.adapters.torch.compile import operators as compiled
from tensortap.adapters.torch.compile.operators import CompileStatus, Found, GraphReceiver, is_exporting
from tensortap.adapters.torch.compile.receivers import GradientReceiver, PortReceiver
from tensortap.adapters.torch.modules.hooks import is_tracing
from tensortap.adapters.torch.modules.nested import tensors_in, tensors_in_containers
from tensortap.adapters.torch.modules.tensors import TensorObserver, without_torch_function
from tensortap.select.ports import RESULT_PORTS
from tensortap.select.sites import Candidate

NO_VALUE: Final = "no value of this name was tapped"
_SLOT: Final = "\x1e"  # between a name and a slot, where an operator in a compiled graph carries both


class _NamedPorts(NamedTuple):
    output: Port | None
    gradient: Port | None
    receivers: tuple[PortReceiver, PortReceiver]  # of output and gradient, inside compiled graphs


class NamedValues:
    """Record the values that the user names."""

    def __init__(self, observer: TensorObserver, steps: StepSource, plan: Plan, compile_status: CompileStatus) -> None:
        self._observer = observer
        self._steps = steps
        self._plan = plan
        self._compile_status = compile_status
        self._known: dict[str, _NamedPorts] = {}
        self._receivers = (_NamedValueReceiver(self, 0, compile_status), _NamedValueReceiver(self, 1, compile_status))
        self._handle, self._gradient_handle = (receiver.handle for receiver in self._receivers)
        self._gradients = any("grad_output" in p.ports for probe in plan.probes for p in probe.patterns)

    def record(self, name: str, value: Any) -> bool:
        """Record a value in eager or compiled code. Return False when there is no tensor in it."""
        if is_compiling():
            if not is_exporting():
                self._record_compiled(name, value)
            return True
        return is_tracing() or self._record_eager(name, value)

    def _record_compiled(self, name: str, value: Any) -> None:
        """Put operators into the graph that record the value when it runs."""
        found = [(name + _SLOT + slot, tensor) for slot, tensor in tensors_in_containers(value)]
        compiled.observe(self._handle, found)
        if self._gradients:
            compiled_backward.await_gradients(self._gradient_handle, found)

    def ports_of(self, name: str) -> _NamedPorts:
        """Return the ports that probes want of a name; decided the first time."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._decide(name)
        return known

    def _record_eager(self, name: str, value: Any) -> bool:
        """Record the tensors in a value and await their gradients. Return False when there is none."""
        known = self.ports_of(name)
        found, recomputed = tensors_in(value, self._observer.not_entered), backward_task() != -1
        step = self._steps.current()
        if known.output is not None and step.armed & known.output.bits:
            for slot, tensor in found:
                self._observer.take(known.output.point(slot), tensor, step, recomputed)
        if known.gradient is not None and step.armed & known.gradient.bits:
            call = count_call(step, known.gradient, recomputed)
            with without_torch_function():
                await_output_gradients(self._observer, self._steps, [known.gradient], found, step, call)
        return bool(found)

    def unseen(self) -> dict[str, str]:
        """Return the patterns that can only mean named values, and found none."""
        return {pattern.text: NO_VALUE for pattern in self._plan.waiting(self._known, RESULT_PORTS)}

    def failed(self, error: Exception) -> None:
        """Count a value in compiled code that could not be recorded."""
        self._observer.recorder.counters.failed("skipped_values", "recording a named value in compiled code", error)

    def _decide(self, name: str) -> _NamedPorts:
        candidate, recorder = Candidate(name, (), RESULT_PORTS), self._observer.recorder
        output, gradient = (self._plan.port_for_named_value(recorder, candidate, port) for port in RESULT_PORTS)
        place = (self._observer, self._steps)
        receivers = (
            PortReceiver(*place, [output] if output else [], self._compile_status),
            GradientReceiver(*place, [gradient] if gradient else [], self._compile_status),
        )
        return _NamedPorts(output, gradient, receivers)


class _NamedValueReceiver(GraphReceiver):
    """Receive all named values of compiled graphs, or all their gradients: each operator carries the name."""

    __slots__ = ("names", "which")

    def __init__(self, names: NamedValues, which: int, compile_status: CompileStatus) -> None:
        super().__init__(compile_status)
        self.names = names
        self.which = which

    def observe(self, tensor: Tensor, slot: str) -> None:
        """Record a value, or its gradient."""
        name, _, slot = slot.partition(_SLOT)
        self._receiver(name).observe(tensor, slot)

    def notified(self, note: str, slots: list[str]) -> None:
        """Note that gradients of these may come; all are slots of one value."""
        if slots:
            self._receiver(slots[0].partition(_SLOT)[0]).notified(note, [slot.partition(_SLOT)[2] for slot in slots])

    def await_gradients(self, found: Found) -> None:
        """As in eager mode."""
        if found:
            self._receiver(found[0][0].partition(_SLOT)[0]).await_gradients(
                [(s.partition(_SLOT)[2], t) for s, t in found]
            )

    def failed(self, error: Exception) -> None:
        """Count the error."""
        self.names.failed(error)

    def _receiver(self, name: str) -> PortReceiver:
        return self.names.ports_of(name).receivers[self.which]
