"""Observe the gradients of what modules return and take, on the autograd graph as it is; see README.md.

A gradient of an output is what arrives at the node that made it. For an input, a hook on the tensor would see the
sum over everything that uses the tensor, and `register_full_backward_hook` would put nodes of its own into the graph.
Instead the nodes that the module's forward added are walked, and a hook on each node with an edge to an input reads
what it sends along that edge.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tensortap.adapters.plan import Port
from tensortap.adapters.torch.distributed.shards import add_locally
from tensortap.adapters.torch.modules.tensors import (
    GRADIENTS,
    TensorObserver,
    answered_in_c,
    use_point,
    without_torch_function,
)
from tensortap.record.recorder import OpenStep
from tensortap.reduce import kernel as kernels

_MOST_NODES: Final = 100_000
backward_task: Final = torch._C._current_graph_task_id  # −1 outside backward: a forward inside it is a recomputation
_SWITCHED_OFF: Final = "ran with gradients switched off"
NO_BACKWARD: Final = "ran, but no backward came back to it"
_OUTPUT_NOT_NEEDED: Final = "its output needs no gradient"
_INPUT_NOT_NEEDED: Final = "its input needs no gradient"
_HANDED_ON: Final = "returns its input unchanged, so the gradient is that of its output"

Edge = tuple[Any, int]
Found = list[tuple[str, Tensor]]  # tensors by slot


class StepSource(Protocol):
    """Provide the step that is open in the calling thread."""

    def current(self) -> OpenStep:
        """Return the calling thread's step."""


class GradientPlace(NamedTuple):
    """Where the gradients of one port are recorded, whichever call they belong to."""

    observer: TensorObserver
    steps: StepSource
    port: Port
    slot: str


class PendingGradient(kernels.NativeHook):
    """A gradient that backward may compute, with the place, step and call that it belongs to."""

    __slots__ = ()
    place: GradientPlace
    step: OpenStep

    def __init__(self, place: GradientPlace, step: OpenStep, call: int) -> None:
        self.place = place
        self.step = step
        self.call = call

    def arrived(self, gradient: Tensor) -> None:
        """Record it in the step of the forward call, or in the open one when that is closed already."""
        observer, steps, port, slot = self.place
        step = steps.current() if self.step.closed else self.step
        if not step.armed & port.bits:
            return
        row = observer.take(port.point(slot), gradient, step)
        if row >= 0 and step is self.step and self.call >= 0:
            step.table.columns["call"][row] = self.call
            self.call = -1  # a second backward over the same graph is counted on


@answered_in_c
class NodeHook(PendingGradient):
    """A pre-hook on the node that made a tensor: it reads the gradient that arrives for it."""

    __slots__ = ()

    def __init__(self, place: GradientPlace, step: OpenStep, call: int) -> None:
        super().__init__(place, step, call)
        self.use_c()

    def use_c(self) -> bool:
        """Have C record the gradient, at places that have a point: where one came before."""
        observer, steps, port, slot = self.place
        point = port.points.get(slot)
        reader = None if point is None else observer.reader(steps)
        self.connect(reader, NodeHook.__call__, GRADIENTS)
        if point is not None:
            use_point(self, point)
        return reader is not None

    @classmethod
    def for_copies(cls, place: GradientPlace) -> NodeHook | None:
        """Return a hook of no step, for C to copy; None while C cannot record at this place."""
        hook = cls.__new__(cls)
        hook.place, hook.call = place, -1
        return hook if hook.use_c() else None

    def register(self, node: Any, index: int) -> None:
        """Register it for one of a node's outputs."""
        self.index = index
        node.register_prehook(self)

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Record the gradient during backward."""
        gradient = gradients[self.index]
        if gradient is not None:
            self.arrived(gradient)


class LeafHook(PendingGradient):
    """A hook on a leaf tensor. It is removed when the step closes: it would stay on the tensor for ever."""

    __slots__ = ("bare", "handle", "tensor")
    __torch_unserializable__ = True  # keeps torch.save of the tensor from warning

    def __call__(self, gradient: Tensor | None) -> None:
        """Record the gradient during backward."""
        if gradient is not None:
            self.arrived(gradient)

    def register(self, tensor: Tensor) -> None:
        """Register it on the tensor."""
        self.bare = tensor._backward_hooks is None
        self.tensor = weakref.ref(tensor)
        self.handle = tensor.register_hook(self)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove it, and the empty dict that PyTorch would leave on the tensor."""
        self.handle.remove()
        tensor = self.tensor()
        if tensor is not None and self.bare and not tensor._backward_hooks:
            tensor._backward_hooks = None


class GradientSum(PendingGradient):
    """Add up what the edges into one input bring; record it when all have come or backward is over."""

    __slots__ = ("edges", "incomplete", "left", "task", "total")

    def expect(self, edges: list[Edge]) -> None:
        """Put a hook on the node of each edge."""
        self.edges = len(edges)
        self.task = self.left = -1
        self.incomplete = False
        self.total: Tensor | None = None
        for node, position in edges:
            node.register_hook(_EdgeHook(self, position))

    def add(self, gradient: Tensor | None) -> None:
        """Add one edge's gradient. Edges that this backward does not use never come."""
        task = backward_task()
        if task != self.task:
            self.task, self.left, self.total, self.incomplete = task, self.edges, None, False
            if self.edges > 1:
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.left -= 1
        if gradient is not None and not self.incomplete:
            self._add(gradient)
        if not self.left:
            self.finish()

    def _add(self, gradient: Tensor) -> None:
        try:
            with torch.no_grad(), without_torch_function():
                self.total = gradient if self.total is None else add_locally(self.total, gradient)
        except Exception:  # a part of the sum is not the gradient
            self.total, self.incomplete = None, True
            raise

    def finish(self) -> None:
        """Record the sum of the gradients so far."""
        total, self.total = self.total, None
        if total is not None:
            self.arrived(total)

    def failed(self, error: Exception) -> None:
        """Count a gradient that could not be added up."""
        observer, _, port, slot = self.place
        where = f"{port.path}:{port.port}{slot}"
        observer.recorder.counters.failed("skipped_tensors", f"recording {where}", error)


class _EdgeHook:
    """A hook on a node that passes on what it sends along one edge."""

    __slots__ = ("position", "sum")

    def __init__(self, to: GradientSum, position: int) -> None:
        self.sum = to
        self.position = position

    def __call__(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> None:
        try:
            self.sum.add(grad_inputs[self.position])
        except Exception as error:
            self.sum.failed(error)


class CallInputs(NamedTuple):
    """The inputs of a call, by their edges in the graph; the call's own nodes have numbers from `since` on."""

    owner: object
    edges: dict[str, Edge]
    since: int


class CallStack(threading.local):
    """The running calls of this thread whose input gradients are wanted, innermost last.

    Inputs are looked up before forward, because an in-place forward moves its input to another node of the graph.
    """

    def __init__(self) -> None:
        self.running: list[CallInputs] = []

    def push(self, owner: object, given: Found) -> None:
        """Note the inputs before a call."""
        self.running.append(inputs_of_call(owner, given))

    def pop(self, owner: object) -> CallInputs | None:
        """Return them after the call. Those that interrupted calls left on top are dropped."""
        for position in range(len(self.running) - 1, -1, -1):
            if self.running[position].owner is owner:
                inputs = self.running[position]
                del self.running[position:]
                return inputs
        return None


def inputs_of_call(owner: object, given: Found) -> CallInputs:
    """Look up the inputs of a call in the graph."""
    enabled = torch.is_grad_enabled()
    edges = {slot: get_gradient_edge(tensor)[:2] for slot, tensor in given if enabled and tensor.requires_grad}
    return CallInputs(owner, edges, newest_node() if edges else 0)


def newest_node() -> int:
    """Return the number that the next node of the graph will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def count_call(step: OpenStep, what: object, recomputed: bool) -> int:
    """Return the number of this call in its step, and count it; gradients come in reverse order."""
    key = (what, True) if recomputed else what
    call: int = step.calls.get(key, 0)
    step.calls[key] = call + 1
    return call


def await_output_gradients(
    observer: TensorObserver, steps: StepSource, ports: list[Port], found: Found, step: OpenStep, call: int
) -> None:
    """Arrange for the gradients of what a module returned to be recorded when backward reaches it."""
    enabled = torch.is_grad_enabled()
    for port in ports:
        if step.armed & port.bits:
            port.note = reason_for_outputs(False)
            for slot, tensor in found:
                if enabled and tensor.requires_grad:
                    port.note = NO_BACKWARD
                    await_gradient(GradientPlace(observer, steps, port, slot), tensor, step, call)


def await_gradient(place: GradientPlace, tensor: Tensor, step: OpenStep, call: int) -> None:
    """Arrange for the gradient of one tensor to be recorded."""
    observer, _, port, slot = place
    if observer.shards is not None:
        observer.shards.record_gradient(port.point(slot), tensor)
    node = tensor.grad_fn
    if node is None:
        leaf = LeafHook(place, step, call)
        leaf.register(tensor)
        observer.leaves.append(leaf)
        return
    NodeHook(place, step, call).register(node, tensor.output_nr)


def await_input_gradients(
    observer: TensorObserver,
    steps: StepSource,
    ports: list[Port],
    inputs: CallInputs,
    found: Found,
    step: OpenStep,
    call: int,
) -> None:
    """Arrange for the gradients of a module's inputs to be recorded, under every name the module has."""
    roots = [t.grad_fn for _, t in found if t.grad_fn is not None] if inputs.edges else []
    edges = edges_into(set(inputs.edges.values()), roots, inputs.since)
    note = reason_for_inputs(inputs, roots)
    for port in ports:
        port.note = note
        for slot, edge in inputs.edges.items():
            if edge in edges:
                GradientSum(GradientPlace(observer, steps, port, slot), step, call).expect(edges[edge])


def reason_for_outputs(awaited: bool) -> str:
    """Return why no gradient of an output was seen so far."""
    if awaited:
        return NO_BACKWARD
    return _OUTPUT_NOT_NEEDED if torch.is_grad_enabled() else _SWITCHED_OFF


def reason_for_inputs(inputs: CallInputs, roots: list[Any]) -> str:
    """Return why no gradient of an input was seen so far."""
    if not torch.is_grad_enabled():
        return _SWITCHED_OFF
    if not inputs.edges:
        return _INPUT_NOT_NEEDED
    given = {node for node, _ in inputs.edges.values()}
    return _HANDED_ON if any(root in given for root in roots) else NO_BACKWARD


def edges_into(targets: set[Edge], roots: list[Any], since: int) -> dict[Edge, list[Edge]]:
    """Return, for each target, the edges (node, position) behind the outputs that lead to it."""
    found: dict[Edge, list[Edge]] = {}
    for node in nodes_since(roots, since):
        for position, edge in enumerate(node.next_functions):
            if edge in targets:
                found.setdefault(edge, []).append((node, position))
    return found


def nodes_since(roots: list[Any], since: int) -> Iterator[Any]:
    """Yield the nodes behind the outputs with numbers from `since` on: those that the forward added."""
    seen: set[Any] = set()
    queue = [node for node in roots if node._sequence_nr() >= since]
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            yield node
            queue.extend(next_ for next_, _ in node.next_functions if next_ and next_._sequence_nr() >= since)
