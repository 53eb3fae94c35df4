"""One operation of one module as a site: which ports the probes want, and what is recorded around a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from tensortap.adapters.plan import OpName, Plan, Port
from tensortap.adapters.torch.autograd.gradients import (
    CallInputs,
    Found,
    StepSource,
    await_input_gradients,
    await_output_gradients,
    backward_task,
    count_call,
    inputs_of_call,
)
from tensortap.adapters.torch.modules.hooks import NO_TENSOR_OUT
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.modules.tensors import (
    OUTPUT,
    TensorObserver,
    mode_is_on,
    use_point,
    without_torch_function,
)
from tensortap.adapters.torch.source import current_line
from tensortap.record.recorder import OpenStep, Point
from tensortap.reduce import kernel as kernels
from tensortap.select.ports import OP_PORTS
from tensortap.types import Call

Where = Callable[[Call], bool]
_NOTHING: Final = contextlib.nullcontext()
_NO_TENSOR_IN: Final = "takes no tensor"


class OpPorts(NamedTuple):
    """The ports of an operation that some probes want."""

    output: list[Port]
    input: list[Port]
    grad_output: list[Port]
    grad_input: list[Port]


class OpSite:
    """A site such as `blocks.3.attn/matmul#1`, made when it is first observed, and then kept."""

    __slots__ = ("_chosen", "_plan", "asks", "bits", "name", "observer", "only_output", "ports", "recorder", "where")

    def __init__(
        self, observer: TensorObserver, plan: Plan, name: OpName, reader: kernels.Reader | None = None
    ) -> None:
        self.observer = observer
        self.name = name
        self._plan = plan
        self._chosen: dict[int, OpPorts] = {}
        self.ports = self._choose(-1)
        self.bits = 0
        for port in (port for group in self.ports for port in group):
            self.bits |= port.bits
        self.asks = [(1 << i, p.where) for i, p in enumerate(plan.probes) if p.where is not None and self.bits >> i & 1]
        self.where = f"{plan.site(name.path)}{name}"
        self.only_output = self._only_output()
        self.recorder = None if reader is None or self.only_output is None else recorder_in_c(reader, self.only_output)
        if self.bits:
            observer.recorder.names.lines.setdefault(self.where, current_line())

    def _only_output(self) -> Point | None:
        """Return the point of the output, if nothing else is ever wanted of this site."""
        output, *others = self.ports
        return output[0].point("") if len(output) == 1 and not any(others) and not self.asks else None

    def wanted_by(self, armed: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpPorts | None:
        """Return the ports that the armed probes want of this call; None when every predicate says no."""
        if not self.asks:
            return self.ports
        asked = self._ask(armed, args, kwargs)
        if asked == armed:
            return self.ports
        return (self._chosen.get(asked) or self._choose(asked)) if asked else None

    def before(
        self, ports: OpPorts, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: OpenStep
    ) -> CallInputs | None:
        """Record the inputs before the call, which an in-place operation changes, and find them in the graph."""
        given = given_in(args, kwargs)
        self.take_inputs(ports, given, step)
        return inputs_of_call(self, given) if ports.grad_input else None

    def after(self, ports: OpPorts, output: Any, noted: CallInputs | None, step: OpenStep, steps: StepSource) -> None:
        """Record the output after the call, and await the gradients."""
        found: Found = [("", output)] if type(output) is Tensor else tensors_in(output)
        self.take_outputs(ports, found, step)
        if ports.grad_output or noted:
            call = count_call(step, self, backward_task() != -1)
            await_output_gradients(self.observer, steps, ports.grad_output, found, step, call)
            if noted:
                await_input_gradients(self.observer, steps, ports.grad_input, noted, found, step, call)

    def finish(self, ports: OpPorts, output: Any, inputs: CallInputs | None, step: OpenStep, steps: StepSource) -> None:
        """Do the same as `after`, hidden from function modes; count errors."""
        try:
            with without_torch_function() if mode_is_on() or type(output) is not Tensor else _NOTHING:
                self.after(ports, output, inputs, step, steps)
        except Exception as error:
            self.failed(error)

    def take_inputs(self, ports: OpPorts, given: Found, step: OpenStep) -> None:
        """Record the inputs."""
        self._take(ports.input, given, step, _NO_TENSOR_IN)

    def take_outputs(self, ports: OpPorts, found: Found, step: OpenStep) -> None:
        """Record the outputs."""
        self._take(ports.output, found, step, NO_TENSOR_OUT)

    def failed(self, error: Exception) -> None:
        """Count an error of ours at this site."""
        self.observer.recorder.counters.failed("skipped_tensors", f"observing {self.where}", error)

    def chosen(self) -> list[OpPorts]:
        """Return every choice of ports that was made so far."""
        return list(self._chosen.values())

    def _take(self, ports: list[Port], found: Found, step: OpenStep, none: str) -> None:
        recomputed = backward_task() != -1
        for port in ports:
            if not found:
                port.note = none
            for slot, tensor in found:
                self.observer.take(port.points.get(slot) or port.point(slot), tensor, step, recomputed)

    def _ask(self, armed: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the armed probes whose predicate accepts this call. A predicate that raises accepts nothing."""
        call = Call(self.name.op, self.name.path, self.name.number, args, kwargs, current_line())
        for bit, where in self.asks:
            try:
                if armed & bit and not where(call):
                    armed &= ~bit
            except Exception as error:
                armed &= ~bit
                self.observer.recorder.counters.failed("predicate_errors", f"where= of a probe for {self.where}", error)
        return armed

    def _choose(self, mask: int) -> OpPorts:
        made = [self._plan.port_for_operation(self.observer.recorder, self.name, port, mask) for port in OP_PORTS]
        ports = self._chosen[mask] = OpPorts(*([port] if port is not None else [] for port in made))
        return ports


def recorder_in_c(reader: kernels.Reader, point: Point) -> kernels.NativeHook:
    """Return what records the outputs of an operation in C."""
    recorder = kernels.NativeHook()
    recorder.connect(reader, recorder_in_c, OUTPUT)
    use_point(recorder, point)
    return recorder


def given_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
    """Return the tensors of a call by position (`[1]`) or keyword (`.weight`); a single one has the empty slot."""
    found = [*tensors_in(tuple(args))]
    if kwargs:
        found += tensors_in({key: value for key, value in kwargs.items() if key != "out"})
    return [("", found[0][1])] if len(found) == 1 else found
