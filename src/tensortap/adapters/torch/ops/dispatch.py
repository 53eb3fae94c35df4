"""Observe operations inside a function that hides them from function modes, by a dispatch mode.

`F.multi_head_attention_forward` is one call to a function mode. A dispatch mode, active for that one call, sees `mm`,
`bmm` and `softmax` in it. It runs below autograd: the nodes of the graph are found afterwards, by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tensortap.adapters.torch.autograd.gradients import (
    Found,
    GradientPlace,
    GradientSum,
    NodeHook,
    StepSource,
    backward_task,
    count_call,
    newest_node,
    nodes_since,
)
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.ops.sites import OpPorts, OpSite, given_in
from tensortap.record.recorder import OpenStep

OPAQUE: Final = frozenset([functional.multi_head_attention_forward])

FindSite = Callable[[Any], OpSite | None]


class _ObservedCall(NamedTuple):
    """A call whose gradients are wanted: the number of the node that it made, and its input slots in order."""

    site: OpSite
    ports: OpPorts
    node: int
    slots: list[str]
    call: int


class DispatchObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observe the dispatcher's calls while one opaque function runs. `find` returns the site of a wanted call."""

    def __init__(self, find: FindSite, step: OpenStep, steps: StepSource) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.find = find
        self.step = step
        self.steps = steps
        self.start = self.newest = newest_node()
        self.seen: list[_ObservedCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        newest = newest_node()
        node = newest - 1 if newest > self.newest else -1  # autograd has made one for this call
        self.newest = newest
        kwargs = kwargs or {}
        site = self.find(func)
        if site is None or not (armed := self.step.armed & site.bits):
            return func(*args, **kwargs)
        ports, given = self._before(site, armed, args, kwargs)
        output = func(*args, **kwargs)
        if ports is not None:
            self._after(site, ports, given, output, node)
        return output

    def await_gradients(self, output: Any) -> None:
        """Await the gradients of the observed calls, once the function has returned."""
        wanted = {seen.node: seen for seen in self.seen}
        if not wanted:
            return
        roots = [t.grad_fn for _, t in tensors_in(output) if t.grad_fn is not None]
        for node in nodes_since(roots, self.start):
            seen = wanted.get(node._sequence_nr())
            if seen is not None:
                self._await(seen, node)

    def _before(
        self, site: OpSite, armed: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[OpPorts | None, Found]:
        try:
            ports = site.wanted_by(armed, args, kwargs)
            if ports is not None and (ports.input or ports.grad_input):
                given = given_in(args, kwargs)
                site.take_inputs(ports, given, self.step)
                return ports, given
            return ports, []
        except Exception as error:
            site.failed(error)
            return None, []

    def _after(self, site: OpSite, ports: OpPorts, given: Found, output: Any, node: int) -> None:
        try:
            site.take_outputs(ports, tensors_in(output), self.step)
            if node >= 0 and (ports.grad_output or ports.grad_input):
                call = count_call(self.step, site, backward_task() != -1)
                self.seen.append(_ObservedCall(site, ports, node, [slot for slot, _ in given], call))
        except Exception as error:
            site.failed(error)

    def _await(self, seen: _ObservedCall, node: Any) -> None:
        observer, steps, step = seen.site.observer, self.steps, self.step
        for port in seen.ports.grad_output:
            NodeHook(GradientPlace(observer, steps, port, ""), step, seen.call).register(node, 0)
        for port in seen.ports.grad_input:
            for position, slot in enumerate(seen.slots[: len(node.next_functions)]):
                if node.next_functions[position][0] is not None:
                    place = GradientPlace(observer, steps, port, slot)
                    GradientSum(place, step, seen.call).expect([(node, position)])
