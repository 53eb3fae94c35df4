"""The gradients of what modules return and take, read off the graph as it is.

A gradient of an output is what arrives at the node that made it. For an input, a hook on the tensor would see the
sum over everything that uses the tensor, and `register_full_backward_hook` would put nodes of its own into the graph.
Instead the nodes that the module's forward added are walked, and those with an edge to an input are asked for what
they send along it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tensortap.adapters.protocol import Port
from tensortap.adapters.torch.distributed.shards import added
from tensortap.adapters.torch.modules.tensors import TensorObserver, aside
from tensortap.record.recorder import OpenStep

_MOST_NODES: Final = 100_000
backward_task: Final = torch._C._current_graph_task_id  # −1 outside backward: a forward inside it is a recomputation
_SWITCHED_OFF: Final = "ran with gradients switched off"
NO_BACKWARD: Final = "ran, but no backward came back to it"
_OUTPUT_NOT_NEEDED: Final = "its output needs no gradient"
_INPUT_NOT_NEEDED: Final = "its input needs no gradient"
_HANDED_ON: Final = "hands its input on as it is, so the gradient is that of its output"

Edge = tuple[Any, int]
Found = list[tuple[str, Tensor]]  # tensors by slot


class Steps(Protocol):
    """Whose step it is now. While `spread` is False it is the tap's current one, and nobody need be asked."""

    spread: bool

    def current(self) -> OpenStep:
        """The calling thread's step."""


class Awaited:
    """A gradient that backward may bring: the place, call and step that it belongs to."""

    __slots__ = ("call", "observer", "port", "slot", "step", "steps")

    def __init__(
        self, observer: TensorObserver, steps: Steps, port: Port, slot: str, step: OpenStep, call: int
    ) -> None:
        self.observer = observer
        self.steps = steps
        self.port = port
        self.slot = slot
        self.step = step
        self.call = call

    def arrived(self, gradient: Tensor) -> None:
        """Record it in the step of the forward call, or in the open one when that is closed already."""
        step = self.steps.current() if self.step.closed else self.step
        if not step.armed & self.port.bits:
            return
        row = self.observer.take(self.port.point(self.slot), gradient, step)
        if row >= 0 and step is self.step and self.call >= 0:
            step.table.columns["call"][row] = self.call
            self.call = -1  # a second backward over the same graph is counted on


class NodeHook(Awaited):
    """Sits before the node that made a tensor and sees the gradient that arrives for it."""

    __slots__ = ("index",)
    index: int  # among the node's outputs

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """During backward."""
        gradient = gradients[self.index]
        if gradient is not None:
            self.arrived(gradient)


class LeafHook(Awaited):
    """Sits on a tensor that no node made. It would stay there for ever, so it goes when the step closes."""

    __slots__ = ("bare", "handle", "tensor")
    __torch_unserializable__ = True  # saving the tensor need not warn of it

    def __call__(self, gradient: Tensor | None) -> None:
        """During backward."""
        if gradient is not None:
            self.arrived(gradient)

    def put_on(self, tensor: Tensor) -> None:
        """Register; `take_off` leaves the tensor as it was."""
        self.bare = tensor._backward_hooks is None
        self.tensor = weakref.ref(tensor)
        self.handle = tensor.register_hook(self)  # type: ignore[no-untyped-call]

    def take_off(self) -> None:
        """Remove, with the empty dict that PyTorch would leave."""
        self.handle.remove()
        tensor = self.tensor()
        if tensor is not None and self.bare and not tensor._backward_hooks:
            tensor._backward_hooks = None


class Sum(Awaited):
    """Adds up what the edges into one input bring, and records it when all have come or backward is over."""

    __slots__ = ("edges", "left", "spoilt", "task", "total")

    def expect(self, senders: list[Edge]) -> None:
        """Ask each sender for what it sends."""
        self.edges = len(senders)
        self.task = self.left = -1
        self.spoilt = False
        self.total: Tensor | None = None
        for node, position in senders:
            node.register_hook(_Sender(self, position))

    def add(self, gradient: Tensor | None) -> None:
        """One edge's gradient. Edges that this backward does not use never come."""
        task = backward_task()
        if task != self.task:
            self.task, self.left, self.total, self.spoilt = task, self.edges, None, False
            if self.edges > 1:
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.left -= 1
        if gradient is not None and not self.spoilt:
            self._add(gradient)
        if not self.left:
            self.finish()

    def _add(self, gradient: Tensor) -> None:
        try:
            with torch.no_grad(), aside():
                self.total = gradient if self.total is None else added(self.total, gradient)
        except Exception:  # half a sum is no gradient
            self.total, self.spoilt = None, True
            raise

    def finish(self) -> None:
        """Record what has come."""
        total, self.total = self.total, None
        if total is not None:
            self.arrived(total)

    def failed(self, error: Exception) -> None:
        """It could not be added up."""
        where = f"{self.port.path}:{self.port.port}{self.slot}"
        self.observer.recorder.counters.failed("skipped_tensors", f"recording {where}", error)


class _Sender:
    """Sits behind a node and hands on what it sends along one edge."""

    __slots__ = ("position", "sum")

    def __init__(self, to: Sum, position: int) -> None:
        self.sum = to
        self.position = position

    def __call__(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> None:
        try:
            self.sum.add(grad_inputs[self.position])
        except Exception as error:
            self.sum.failed(error)


class Noted(NamedTuple):
    """What is known of a call before it runs: where its inputs lie in the graph, and which node is the newest."""

    owner: object
    edges: dict[str, Edge]
    since: int


class InputEdges(threading.local):
    """The calls that are running in this thread and whose input gradients are wanted, innermost last.

    They are noted before forward, because an in-place forward moves its input to another place in the graph.
    """

    def __init__(self) -> None:
        self.running: list[Noted] = []

    def note(self, owner: object, given: Found) -> None:
        """Before a call."""
        self.running.append(note_inputs(owner, given))

    def recall(self, owner: object) -> Noted | None:
        """After it. What an interrupted call left on top is dropped."""
        for position in range(len(self.running) - 1, -1, -1):
            if self.running[position].owner is owner:
                noted = self.running[position]
                del self.running[position:]
                return noted
        return None


def note_inputs(owner: object, given: Found) -> Noted:
    """Where the inputs of a call lie in the graph, and from which node on the nodes are its own."""
    enabled = torch.is_grad_enabled()
    edges = {slot: get_gradient_edge(tensor)[:2] for slot, tensor in given if enabled and tensor.requires_grad}
    return Noted(owner, edges, newest_node() if edges else 0)


def newest_node() -> int:
    """The number that the next node of the graph will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def count_call(step: OpenStep, what: object, recomputed: bool) -> int:
    """Which call in its step this is, and one more: gradients come in the opposite order."""
    key = (what, True) if recomputed else what
    call: int = step.calls.get(key, 0)
    step.calls[key] = call + 1
    return call


def await_outputs(
    observer: TensorObserver, steps: Steps, ports: list[Port], found: Found, step: OpenStep, call: int
) -> None:
    """Arrange for the gradients of what a module returned to be recorded when backward reaches it."""
    enabled = torch.is_grad_enabled()
    for port in ports:
        if step.armed & port.bits:
            port.note = reason_for_outputs(False)
            for slot, tensor in found:
                if enabled and tensor.requires_grad:
                    port.note = NO_BACKWARD
                    await_one(observer, steps, port, slot, tensor, step, call)


def await_one(
    observer: TensorObserver, steps: Steps, port: Port, slot: str, tensor: Tensor, step: OpenStep, call: int
) -> None:
    """Arrange for the gradient of one tensor to be recorded."""
    if observer.parts is not None:
        observer.parts.note(port.point(slot), tensor)
    node = tensor.grad_fn
    if node is None:
        leaf = LeafHook(observer, steps, port, slot, step, call)
        leaf.put_on(tensor)
        observer.leaves.append(leaf)
        return
    hook = NodeHook(observer, steps, port, slot, step, call)
    hook.index = tensor.output_nr
    node.register_prehook(hook)


def await_inputs(
    observer: TensorObserver, steps: Steps, ports: list[Port], noted: Noted, found: Found, step: OpenStep, call: int
) -> None:
    """Arrange for the gradients of a module's inputs to be recorded, under every name the module has."""
    roots = [t.grad_fn for _, t in found if t.grad_fn is not None] if noted.edges else []
    senders = senders_of(set(noted.edges.values()), roots, noted.since)
    note = reason_for_inputs(noted, roots)
    for port in ports:
        port.note = note
        for slot, edge in noted.edges.items():
            if edge in senders:
                Sum(observer, steps, port, slot, step, call).expect(senders[edge])


def reason_for_outputs(awaited: bool) -> str:
    """Why no gradient of an output may come; overtaken by events when one does."""
    if awaited:
        return NO_BACKWARD
    return _OUTPUT_NOT_NEEDED if torch.is_grad_enabled() else _SWITCHED_OFF


def reason_for_inputs(noted: Noted, roots: list[Any]) -> str:
    """The same of an input."""
    if not torch.is_grad_enabled():
        return _SWITCHED_OFF
    if not noted.edges:
        return _INPUT_NOT_NEEDED
    given = {node for node, _ in noted.edges.values()}
    return _HANDED_ON if any(root in given for root in roots) else NO_BACKWARD


def senders_of(targets: set[Edge], roots: list[Any], since: int) -> dict[Edge, list[Edge]]:
    """For each target edge, the nodes behind the outputs that send along it, and at which position."""
    found: dict[Edge, list[Edge]] = {}
    for node in nodes_since(roots, since):
        for position, edge in enumerate(node.next_functions):
            if edge in targets:
                found.setdefault(edge, []).append((node, position))
    return found


def nodes_since(roots: list[Any], since: int) -> Iterator[Any]:
    """The nodes behind the outputs that were made since, which are those that the forward added."""
    seen: set[Any] = set()
    queue = [node for node in roots if node._sequence_nr() >= since]
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            yield node
            queue.extend(next_ for next_, _ in node.next_functions if next_ and next_._sequence_nr() >= since)
