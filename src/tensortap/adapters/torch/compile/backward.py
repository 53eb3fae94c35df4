"""Observe gradients inside compiled graphs by hooks that are registered while the compiler traces autograd.

To make the backward graph, the compiler runs the forward operations with autograd on tensors without data. The nodes
of that autograd graph are those of eager mode, and the same hooks can be put on them: what the hooks call is compiled
into backward. So the gradients are those of eager mode, and the graph of the user's computation is not changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tensortap.adapters.torch.autograd.gradients import (
    CallStack,
    GradientSum,
    edges_into,
    reason_for_inputs,
    reason_for_outputs,
)
from tensortap.adapters.torch.compile.operators import (
    BACKWARD_ORDER,
    FORWARD_ORDER,
    KERNELS,
    LIBRARY,
    SEPARATOR,
    Found,
    split,
)

_CALLS: Final = CallStack()
_FAKE: Final = "FakeTensor"  # Dynamo only wants to know the shapes
NOT_ARRANGED: Final = "could not be observed: registering a hook while compiling failed"


# Hooks call these while they are compiled. Dynamo traces them: they must stay plain.


def await_gradients(handle: Tensor, found: Found) -> None:
    """Observe the gradients of these tensors."""
    slots = SEPARATOR.join([slot for slot, _ in found])
    torch.ops.tensortap.await_gradients([t for _, t in found], FORWARD_ORDER, BACKWARD_ORDER, handle, slots)


def begin_call(handle: Tensor, given: Found) -> None:
    """Begin a call of a module: observe the gradients that this module alone sends back to its inputs."""
    slots = SEPARATOR.join([slot for slot, _ in given])
    torch.ops.tensortap.begin_call([t for _, t in given], FORWARD_ORDER, handle, slots)


def end_call(handle: Tensor, outs: Found) -> None:
    """End the call: the module has returned these tensors."""
    torch.ops.tensortap.end_call([t for _, t in outs], FORWARD_ORDER, BACKWARD_ORDER, handle)


# What the operators do while the compiler traces autograd.


class _GradientHook:
    """Insert an operator into backward for a gradient: before the node that made a tensor, or on a leaf tensor."""

    def __init__(self, order: Tensor, handle: Tensor, slot: str, index: int) -> None:
        self.order, self.handle, self.slot, self.index = order, handle, slot, index

    def __call__(self, gradients: Any) -> None:
        gradient = gradients[self.index] if isinstance(gradients, tuple) else gradients
        if gradient is not None:
            torch.ops.tensortap.observe(gradient, self.order, self.handle, self.slot)


class _TracedGradientSum(GradientSum):
    """Add up, inside the graph, the gradients of all edges into one input."""

    __slots__ = ("handle", "order", "slot")

    def __init__(self, order: Tensor, handle: Tensor, slot: str) -> None:
        self.order, self.handle, self.slot = order, handle, slot

    def arrived(self, gradient: Tensor) -> None:
        """Observe the sum."""
        torch.ops.tensortap.observe(gradient, self.order, self.handle, self.slot)

    def failed(self, error: Exception) -> None:
        """Make the graph without it; at close it is reported as unseen."""


def _await_gradients(outs: list[Tensor], order: Tensor, backward: Tensor, handle: Tensor, slots: str) -> None:
    found = list(zip(split(slots, len(outs)), outs, strict=True))
    args = (outs, order, backward, handle, slots)
    _arrange("await_gradients", args, handle, order, lambda: _await_outputs(found, backward, handle))


def _end_call(outs: list[Tensor], order: Tensor, backward: Tensor, handle: Tensor) -> None:
    args = (outs, order, backward, handle)
    _arrange("end_call", args, handle, order, lambda: _await_inputs(outs, backward, handle))


def _begin_call(given: list[Tensor], order: Tensor, handle: Tensor, slots: str) -> None:
    if type(handle) is Tensor:
        KERNELS["begin_call"](given, order, handle, slots)
    elif type(handle).__name__ != _FAKE:
        _CALLS.push(handle, list(zip(split(slots, len(given)), given, strict=True)))


def _arrange(
    name: str, args: tuple[Any, ...], handle: Tensor, order: Tensor, trace: Callable[[], tuple[str, list[str]]]
) -> None:
    """Do as eager mode does if there is data; otherwise put hooks on the graph, and report them when the graph runs."""
    if type(handle) is Tensor:
        KERNELS[name](*args)
        return
    if type(handle).__name__ == _FAKE:
        return
    try:
        note, awaited = trace()
    except Exception as error:  # the user's code must compile nevertheless
        note, awaited = f"{NOT_ARRANGED}: {type(error).__name__}: {error}", []
    torch.ops.tensortap.notify(order, handle, note, "".join(slot + SEPARATOR for slot in awaited))


def _await_outputs(found: Found, order: Tensor, handle: Tensor) -> tuple[str, list[str]]:
    """Hook the nodes that made the outputs."""
    awaited = [(slot, t) for slot, t in found if torch.is_grad_enabled() and t.requires_grad]
    for slot, tensor in awaited:
        hook = _GradientHook(order, handle, slot, tensor.output_nr)
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(hook)
        else:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    if awaited:
        _skip_version_check(order)
    return reason_for_outputs(bool(awaited)), [slot for slot, _ in awaited]


def _await_inputs(outs: list[Tensor], order: Tensor, handle: Tensor) -> tuple[str, list[str]]:
    """Hook the nodes that send gradients to the inputs."""
    inputs = _CALLS.pop(handle)
    if inputs is None:
        return NOT_ARRANGED, []
    roots = [t.grad_fn for t in outs if t.grad_fn is not None] if inputs.edges else []
    edges = edges_into(set(inputs.edges.values()), roots, inputs.since)
    awaited = [slot for slot, edge in inputs.edges.items() if edge in edges]
    for slot in awaited:
        _TracedGradientSum(order, handle, slot).expect(edges[inputs.edges[slot]])
    if awaited:
        _skip_version_check(order)
    return reason_for_inputs(inputs, roots), awaited


def _skip_version_check(order: Tensor) -> None:
    """Prevent that a backward, which declares a write to `order`, invalidates the backward of an earlier call.

    Where the compiler runs the operator in place, no version is counted; where it copies, it must be told not to check.
    Older versions cannot be told: with `backend="aot_eager"`, a module that runs twice before backward fails there.
    """
    with contextlib.suppress(Exception):
        tracing = sys.modules["torch.fx.experimental.proxy_tensor"]
        for proxy in tracing._get_proxies(order):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


for _name, _kernel in (("await_gradients", _await_gradients), ("begin_call", _begin_call), ("end_call", _end_call)):
    LIBRARY.impl(_name, _kernel, "Autograd")
