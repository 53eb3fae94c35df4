"""The gradients of a module's own inputs, read off the graph as it is.

A hook on the input tensor would see the sum over everything that uses the tensor; `register_full_backward_hook`
would put nodes of its own into the graph. Instead the nodes that the module's forward added are walked, and those
with an edge to an input are asked for what they send along it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tensortap.adapters.base import Port
from tensortap.adapters.torch.tensors import Taker
from tensortap.adapters.torch.walk import tensors_in
from tensortap.recorder import OpenStep, Point

_MOST_NODES: Final = 100_000


class InputGradients:
    """Adds up what the edges into one input bring, and records it when all have come."""

    __slots__ = ("expected", "point", "steps", "taker", "total")

    def __init__(self, taker: Taker, steps: Callable[[], OpenStep], point: Point, expected: int) -> None:
        self.taker = taker
        self.steps = steps
        self.point = point
        self.expected = expected
        self.total: Tensor | None = None

    def arrive(self, gradient: Tensor | None) -> None:
        """One edge's gradient."""
        self.expected -= 1
        if gradient is not None:
            with torch.no_grad():
                self.total = gradient if self.total is None else self.total + gradient
        if not self.expected and self.total is not None:
            self.taker.take(self.point, self.total, self.steps())
            self.total = None

    @classmethod
    def await_(
        cls,
        taker: Taker,
        steps: Callable[[], OpenStep],
        ports: list[Port],
        given: list[tuple[str, Tensor]],
        output: Any,
    ) -> None:
        """Arrange for the gradients of the inputs `given` to be recorded, under every name the module has."""
        wanted = [(slot, tensor) for slot, tensor in given if tensor.requires_grad]
        if not wanted:
            return
        edges = {slot: get_gradient_edge(tensor)[:2] for slot, tensor in wanted}
        found = _edges_into(set(edges.values()), [t for _, t in tensors_in(output) if t.grad_fn is not None])
        for port in ports:
            for slot, edge in edges.items():
                senders = found.get(edge, [])
                if senders:
                    collector = cls(taker, steps, port.point(slot), len(senders))
                    for node, position in senders:
                        node.register_hook(_Sender(collector, position))


class _Sender:
    """Sits on a node and hands on what it sends along one edge."""

    __slots__ = ("collector", "position")

    def __init__(self, collector: InputGradients, position: int) -> None:
        self.collector = collector
        self.position = position

    def __call__(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
        self.collector.arrive(grad_inputs[self.position])


def _edges_into(targets: set[tuple[Any, int]], outputs: list[Tensor]) -> dict[tuple[Any, int], list[tuple[Any, int]]]:
    """For each target edge, the nodes behind the outputs that send along it, and at which position."""
    found: dict[tuple[Any, int], list[tuple[Any, int]]] = {}
    stop = {node for node, _ in targets}
    for node in _nodes([t.grad_fn for t in outputs], stop):
        for position, edge in enumerate(node.next_functions):
            if edge in targets:
                found.setdefault(edge, []).append((node, position))
    return found


def _nodes(roots: list[Any], stop: set[Any]) -> Iterator[Any]:
    """The graph behind the outputs, no further than the inputs' own nodes and no older than the oldest of them."""
    oldest = min((_age(node) for node in stop), default=0)
    seen: set[Any] = set()
    queue = [root for root in roots if root is not None and root not in stop]
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        queue.extend(n for n, _ in node.next_functions if n is not None and n not in stop and _age(n) >= oldest)


def _age(node: Any) -> int:
    """A node's place in the order of creation; leaves have none and count as young."""
    number = int(node._sequence_nr())
    return 1 << 62 if number >= 1 << 62 or number < 0 else number
