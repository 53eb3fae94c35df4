"""Operators that a hook puts into a compiled graph instead of reading the tensor itself. See README.md.

Every operator declares that it writes to `order`, one tensor that all of them share, so that the compiler neither
removes them as dead code nor reorders them; nothing is written. `handle` is a tensor that holds the id of a
`GraphReceiver`, which is looked up when the graph runs. Gradients are arranged for in `backward`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

SEPARATOR: Final = "\x1f"
CALLED: Final = "called"
Found = list[tuple[str, Tensor]]  # tensors by slot

# Older versions lack it; there an exported program cannot be told from a compiled one.
is_exporting: Final = getattr(torch.compiler, "is_exporting", bool)

FORWARD_ORDER: Final = torch.zeros(())
BACKWARD_ORDER: Final = torch.zeros(())  # separate: a graph that saved it for backward must not see a write to it

_IDS: Final = itertools.count(1)
_RECEIVERS: Final[weakref.WeakValueDictionary[int, GraphReceiver]] = weakref.WeakValueDictionary()

LIBRARY: Final[Any] = torch.library.Library("tensortap", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("observe(Tensor x, Tensor(a!) order, Tensor handle, str slot) -> ()")
LIBRARY.define("notify(Tensor(a!) order, Tensor handle, str note, str slots) -> ()")
LIBRARY.define("await_gradients(Tensor[] outs, Tensor(a!) order, Tensor backward, Tensor handle, str slots) -> ()")
LIBRARY.define("begin_call(Tensor[] given, Tensor(a!) order, Tensor handle, str slots) -> ()")
LIBRARY.define("end_call(Tensor[] outs, Tensor(a!) order, Tensor backward, Tensor handle) -> ()")


class CompileStatus:
    """Whether any module of one model is due to be compiled (`due`), is compiled, and has run compiled with a tap."""

    def __init__(self) -> None:
        self.due = self.compiled = self.ran = False


class GraphReceiver:
    """Receive what the operators in a graph see. Hooks pass its `handle` to the operators."""

    __slots__ = ("__weakref__", "compile_status", "handle")

    def __init__(self, compile_status: CompileStatus) -> None:
        number = next(_IDS)
        self.compile_status = compile_status
        # The user's function modes do not see it made, and it takes a quarter of the time of torch.tensor().
        self.handle = torch.from_numpy(np.array(number, np.int64))
        _RECEIVERS[number] = self

    def observe(self, tensor: Tensor, slot: str) -> None:
        """Take a tensor that the graph has computed."""

    def notified(self, note: str, slots: list[str]) -> None:
        """Take a message that comes without a tensor."""

    def await_gradients(self, found: Found) -> None:
        """Arrange for gradients of these tensors; called where autograd runs while the graph runs."""

    def call_begins(self, given: Found) -> None:
        """Note the inputs of a call whose input gradients are wanted; called where autograd runs with the graph."""

    def call_ends(self, outs: list[Tensor]) -> None:
        """Arrange for the gradients of those inputs."""

    def failed(self, error: Exception) -> None:
        """Handle an error that one of these methods raised during the user's step."""
        raise error


# Hooks call the next two while they are compiled. Dynamo traces them: they must stay plain.


def observe(handle: Tensor, found: Found) -> None:
    """Put operators into the graph that observe these tensors."""
    for slot, tensor in found:
        torch.ops.tensortap.observe(tensor, FORWARD_ORDER, handle, slot)


def notify(handle: Tensor, note: str) -> None:
    """Put an operator into the graph that sends a message."""
    torch.ops.tensortap.notify(FORWARD_ORDER, handle, note, "")


# What the operators do when the graph runs.


def receiver_of(handle: Tensor) -> GraphReceiver | None:
    """Return the receiver behind a handle, or None once its tap is closed."""
    found = _RECEIVERS.get(int(handle))
    if found is not None:
        found.compile_status.compiled = found.compile_status.ran = True
    return found


def split(slots: str, count: int) -> list[str]:
    """Split joined slots again; a single one may be empty."""
    return slots.split(SEPARATOR) if count else []


def _by_slot(tensors: list[Tensor], slots: str) -> Found:
    return list(zip(split(slots, len(tensors)), tensors, strict=True))


def _deliver(handle: Tensor, call: Callable[[GraphReceiver], None]) -> None:
    receiver = receiver_of(handle)
    if receiver is not None:
        try:
            call(receiver)
        except Exception as error:
            receiver.failed(error)


def _observe(x: Tensor, order: Tensor, handle: Tensor, slot: str) -> None:
    _deliver(handle, lambda receiver: receiver.observe(x, slot))


def _notify(order: Tensor, handle: Tensor, note: str, slots: str) -> None:
    awaited = slots.split(SEPARATOR)[:-1]  # each ends with the separator, because a slot may be empty
    _deliver(handle, lambda receiver: receiver.notified(note, awaited))


def _await_gradients(outs: list[Tensor], order: Tensor, backward: Tensor, handle: Tensor, slots: str) -> None:
    _deliver(handle, lambda receiver: receiver.await_gradients(_by_slot(outs, slots)))


def _begin_call(given: list[Tensor], order: Tensor, handle: Tensor, slots: str) -> None:
    _deliver(handle, lambda receiver: receiver.call_begins(_by_slot(given, slots)))


def _end_call(outs: list[Tensor], order: Tensor, backward: Tensor, handle: Tensor) -> None:
    _deliver(handle, lambda receiver: receiver.call_ends(outs))


def _fake(*args: Any) -> None:
    """Return nothing: the operators have no result whose shape would be needed."""


KERNELS: Final[dict[str, Callable[..., None]]] = {
    "observe": _observe,
    "notify": _notify,
    "await_gradients": _await_gradients,
    "begin_call": _begin_call,
    "end_call": _end_call,
}
for _name, _kernel in KERNELS.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    # Nothing is written, so the version counter stays: whatever saved `backward` for its backward finds it unchanged.
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "ADInplaceOrView")
    torch.library.register_fake(f"tensortap::{_name}", _fake, lib=LIBRARY)
