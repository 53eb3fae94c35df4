"""Taps inside what torch.compile makes: operations that stay in the graph and that the compiler cannot look into.

A hook that is compiled with its module calls one of these instead of looking at the tensor. Each declares that it
writes to `order`, one tensor that they all share: so none is removed as dead code, none is a graph break, and they keep
their order. Nothing is written. `site` holds a number, by which the operation finds its target when it runs: whether
the step is observed is asked there, never by the graph. The number is data, so blocks that are compiled one by one
share a graph, and nothing here keeps a target alive.

Gradients are arranged for while the compiler follows autograd, in `compiled_backward`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

SEPARATOR: Final = "\x1f"
CALLED: Final = "called"
Found = list[tuple[str, Tensor]]  # tensors by slot

# Unknown to older versions, where an exported program cannot be told from a compiled one.
is_exporting: Final = getattr(torch.compiler, "is_exporting", bool)

ORDER: Final = torch.zeros(())  # of what forward does
BACK: Final = torch.zeros(())  # of what backward does: a graph that saved it for backward must not find it written to

_NUMBERS: Final = itertools.count(1)
_TARGETS: Final[weakref.WeakValueDictionary[int, Target]] = weakref.WeakValueDictionary()

LIBRARY: Final[Any] = torch.library.Library("tensortap", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("see(Tensor x, Tensor(a!) order, Tensor site, str slot) -> ()")
LIBRARY.define("tell(Tensor(a!) order, Tensor site, str note, str slots) -> ()")
LIBRARY.define("expect(Tensor[] outs, Tensor(a!) order, Tensor back, Tensor site, str slots) -> ()")
LIBRARY.define("enter(Tensor[] given, Tensor(a!) order, Tensor site, str slots) -> ()")
LIBRARY.define("leave(Tensor[] outs, Tensor(a!) order, Tensor back, Tensor site) -> ()")


class Regions:
    """Whether anything of one model is due to be compiled, is, and has run with an operation of ours in it."""

    def __init__(self) -> None:
        self.due = self.compiled = self.ran = False


class Target:
    """What an operation finds behind its number. `site` is what hooks hand to the operation."""

    __slots__ = ("__weakref__", "regions", "site")

    def __init__(self, regions: Regions) -> None:
        number = next(_NUMBERS)
        self.regions = regions
        with torch._C.DisableTorchFunction():  # no mode of the user's need see it made
            self.site = torch.tensor(number)
        _TARGETS[number] = self

    def see(self, tensor: Tensor, slot: str) -> None:
        """A tensor has come by."""

    def told(self, note: str, slots: list[str]) -> None:
        """Something has happened that has no tensor."""

    def expect(self, found: Found) -> None:
        """Gradients of these may come; called where autograd is at work while the graph runs."""

    def enter(self, given: Found) -> None:
        """A call begins whose input gradients are wanted; called where autograd is at work while the graph runs."""

    def leave(self, outs: list[Tensor]) -> None:
        """It ends."""

    def failed(self, error: Exception) -> None:
        """One of these raised, in the middle of the user's step."""
        raise error


# What hooks call while they are compiled. Dynamo follows these functions: they must stay plain.


def see(site: Tensor, found: Found) -> None:
    """Put operations into the graph that see these tensors."""
    for slot, tensor in found:
        torch.ops.tensortap.see(tensor, ORDER, site, slot)


def tell(site: Tensor, note: str) -> None:
    """Put an operation into the graph that tells something."""
    torch.ops.tensortap.tell(ORDER, site, note, "")


# What the operations do when they run.


def target_of(site: Tensor) -> Target | None:
    """The target behind a number, unless its tap is gone."""
    found = _TARGETS.get(int(site))
    if found is not None:
        found.regions.compiled = found.regions.ran = True
    return found


def split(slots: str, count: int) -> list[str]:
    """So many slots as they were before they were joined; a single one may be empty."""
    return slots.split(SEPARATOR) if count else []


def _reach(site: Tensor, method: str, *args: Any) -> None:
    target = target_of(site)
    if target is not None:
        try:
            getattr(target, method)(*args)
        except Exception as error:
            target.failed(error)


def _see(x: Tensor, order: Tensor, site: Tensor, slot: str) -> None:
    _reach(site, "see", x, slot)


def _tell(order: Tensor, site: Tensor, note: str, slots: str) -> None:
    _reach(site, "told", note, slots.split(SEPARATOR)[:-1])  # each is ended by the separator, for one may be empty


def _expect(outs: list[Tensor], order: Tensor, back: Tensor, site: Tensor, slots: str) -> None:
    _reach(site, "expect", list(zip(split(slots, len(outs)), outs, strict=True)))


def _enter(given: list[Tensor], order: Tensor, site: Tensor, slots: str) -> None:
    _reach(site, "enter", list(zip(split(slots, len(given)), given, strict=True)))


def _leave(outs: list[Tensor], order: Tensor, back: Tensor, site: Tensor) -> None:
    _reach(site, "leave", outs)


def _nothing(*args: Any) -> None:
    """What an operation gives without data."""


RUN: Final[dict[str, Callable[..., None]]] = {
    "see": _see,
    "tell": _tell,
    "expect": _expect,
    "enter": _enter,
    "leave": _leave,
}
for _name, _run in RUN.items():
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    # Nothing is written, so no version is counted up: what saved `back` for its backward finds it as it was.
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "ADInplaceOrView")
    torch.library.register_fake(f"tensortap::{_name}", _nothing, lib=LIBRARY)
