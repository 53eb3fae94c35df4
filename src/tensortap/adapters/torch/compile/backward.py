"""Gradients inside what torch.compile makes, arranged for while the compiler follows autograd.

To make the backward graph, the compiler runs the forward operations with autograd on tensors without data. There the
nodes of the graph are as in eager mode, and the same hooks can be put on them: what they call is compiled into
backward. So gradients are those that eager mode would show, and the graph of the user's computation is not changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tensortap.adapters.torch.autograd.gradients import (
    InputEdges,
    Sum,
    reason_for_inputs,
    reason_for_outputs,
    senders_of,
)
from tensortap.adapters.torch.compile.operators import BACK, LIBRARY, ORDER, RUN, SEPARATOR, Found, split

_EDGES: Final = InputEdges()
_FAKE: Final = "FakeTensor"  # Dynamo only wants to know the shapes
UNARRANGED: Final = "could not be arranged for while compiling"


# What hooks call while they are compiled. Dynamo follows these functions: they must stay plain.


def expect(site: Tensor, found: Found) -> None:
    """Have the gradients of these seen."""
    torch.ops.tensortap.expect([t for _, t in found], ORDER, BACK, site, SEPARATOR.join([slot for slot, _ in found]))


def enter(site: Tensor, given: Found) -> None:
    """Have the gradients that a module sends back to these seen, and no one else's."""
    torch.ops.tensortap.enter([t for _, t in given], ORDER, site, SEPARATOR.join([slot for slot, _ in given]))


def leave(site: Tensor, outs: Found) -> None:
    """The module has returned these."""
    torch.ops.tensortap.leave([t for _, t in outs], ORDER, BACK, site)


# What that comes to when the compiler follows autograd.


class _Arrival:
    """Sits before the node that made a tensor, or on a tensor that no node made, and has the gradient seen."""

    def __init__(self, back: Tensor, site: Tensor, slot: str, index: int) -> None:
        self.back, self.site, self.slot, self.index = back, site, slot, index

    def __call__(self, gradients: Any) -> None:
        gradient = gradients[self.index] if isinstance(gradients, tuple) else gradients
        if gradient is not None:
            torch.ops.tensortap.see(gradient, self.back, self.site, self.slot)


class _TracedSum(Sum):
    """What the edges into one input bring, added up inside the graph."""

    __slots__ = ("back", "site")

    def __init__(self, back: Tensor, site: Tensor, slot: str) -> None:
        self.back, self.site, self.slot = back, site, slot

    def arrived(self, gradient: Tensor) -> None:
        """Have it seen."""
        torch.ops.tensortap.see(gradient, self.back, self.site, self.slot)

    def failed(self, error: Exception) -> None:
        """The graph is made without it, and at the end it is unseen."""


def _expect(outs: list[Tensor], order: Tensor, back: Tensor, site: Tensor, slots: str) -> None:
    found = list(zip(split(slots, len(outs)), outs, strict=True))
    _arrange(RUN["expect"], (outs, order, back, site, slots), site, order, lambda: _await(found, back, site))


def _leave(outs: list[Tensor], order: Tensor, back: Tensor, site: Tensor) -> None:
    _arrange(RUN["leave"], (outs, order, back, site), site, order, lambda: _await_inputs(outs, back, site))


def _enter(given: list[Tensor], order: Tensor, site: Tensor, slots: str) -> None:
    if type(site) is Tensor:
        RUN["enter"](given, order, site, slots)
    elif type(site).__name__ != _FAKE:
        _EDGES.note(site, list(zip(split(slots, len(given)), given, strict=True)))


def _arrange(
    run: Callable[..., None], args: tuple[Any, ...], site: Tensor, order: Tensor, trace: Callable[[], tuple[str, Any]]
) -> None:
    """Where data flows, do as eager mode does. Otherwise put hooks on the graph, and tell of it when it runs."""
    if type(site) is Tensor:
        run(*args)
        return
    if type(site).__name__ == _FAKE:
        return
    try:
        note, awaited = trace()
    except Exception as error:  # the user's code must compile all the same
        note, awaited = f"{UNARRANGED}: {type(error).__name__}: {error}", ()
    torch.ops.tensortap.tell(order, site, note, "".join(slot + SEPARATOR for slot in awaited))


def _await(found: Found, back: Tensor, site: Tensor) -> tuple[str, list[str]]:
    """Hooks on what made the outputs."""
    awaited = [(slot, t) for slot, t in found if torch.is_grad_enabled() and t.requires_grad]
    for slot, tensor in awaited:
        arrival = _Arrival(back, site, slot, tensor.output_nr)
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(arrival)
        else:
            tensor.register_hook(arrival)  # type: ignore[no-untyped-call]
    if awaited:
        _leave_versions_alone(back)
    return reason_for_outputs(bool(awaited)), [slot for slot, _ in awaited]


def _await_inputs(outs: list[Tensor], back: Tensor, site: Tensor) -> tuple[str, list[str]]:
    """Hooks on what sends gradients to the inputs."""
    noted = _EDGES.recall(site)
    if noted is None:
        return UNARRANGED, []
    roots = [t.grad_fn for t in outs if t.grad_fn is not None] if noted.edges else []
    senders = senders_of(set(noted.edges.values()), roots, noted.since)
    awaited = [slot for slot, edge in noted.edges.items() if edge in senders]
    for slot in awaited:
        _TracedSum(back, site, slot).expect(senders[noted.edges[slot]])
    if awaited:
        _leave_versions_alone(back)
    return reason_for_inputs(noted, roots), awaited


def _leave_versions_alone(back: Tensor) -> None:
    """A backward that declares to write to `back` must not spoil that of an earlier call, which has saved it too.

    Where the compiler runs the operation in place, nothing is counted; where it copies, it needs to be told. Older
    versions cannot be told: with `backend="aot_eager"`, a module that runs twice before backward fails there.
    """
    with contextlib.suppress(Exception):
        tracing = sys.modules["torch.fx.experimental.proxy_tensor"]
        for proxy in tracing._get_proxies(back):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


for _name, _kernel in (("expect", _expect), ("enter", _enter), ("leave", _leave)):
    LIBRARY.impl(_name, _kernel, "Autograd")
