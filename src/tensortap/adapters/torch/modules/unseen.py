"""Explain why a wanted port was never observed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from torch import nn

from tensortap.adapters.plan import Port
from tensortap.adapters.torch.autograd.gradients import NO_BACKWARD
from tensortap.adapters.torch.autograd.parameters import NO_OPTIMIZER
from tensortap.adapters.torch.modules import tree as modules
from tensortap.select.ports import MEMBER_PORTS, MODULE_PORTS

NEVER: Final = "never ran in a step that was observed"
MAYBE_COMPILED: Final = (
    "never ran in a step that was observed, unless in a function that was compiled before it was watched, where hooks "
    "put on later are passed by: watch first, or call torch.compiler.reset() after watch()"
)
ALL_HIDDEN: Final = (
    "nothing was seen inside the watched model: it did not run, or it ran in a function that was compiled before it "
    "was watched, where hooks put on later are passed by. Watch first, or call torch.compiler.reset() after watch()"
)
OR_INSIDE: Final = " outside the compiled graph that uses it too"
FUSED: Final = (
    "ran fused inside nn.TransformerEncoderLayer; watch(..., fast_path='leave') shows it, with other rounding"
)
NOT_CALLED: Final = (
    "parts of the watched model ran, but the model itself was never called (a direct .forward() call passes hooks "
    "by), so no step could be found: close each with tap.step()"
)


def explain(ports: Iterable[Port], root: nn.Module | None, fused: Collection[str], compiled: bool) -> dict[str, str]:
    """Return the ports that observed nothing, each with the reason. `compiled`: torch.compile may hide some."""
    default = MAYBE_COMPILED if compiled else NEVER
    return {f"{port.path}:{port.port}": _why(port, root, fused, default) for port in ports if not port.seen}


def inside_graphs(found: dict[str, str]) -> dict[str, str]:
    """Add, where the model is compiled, that a tensor used inside the graph too may get its gradient there."""
    return {site: f"{why}{OR_INSIDE}" if why == NO_BACKWARD else why for site, why in found.items()}


def all_hidden(ports: Iterable[Port], unseen: dict[str, str]) -> bool:
    """Return whether no module was observed at all, and compiled code may be why."""
    found = [unseen.get(f"{port.path}:{port.port}") for port in ports if port.port in MODULE_PORTS]
    return bool(found) and all(why == MAYBE_COMPILED for why in found)


def _why(port: Port, root: nn.Module | None, fused: Collection[str], default: str) -> str:
    if port.note:
        return port.note
    if port.port in MEMBER_PORTS:
        return NO_OPTIMIZER if port.port == "update" else NEVER
    if port.path in fused:
        return FUSED
    return (modules.reason_unseen(root, port.path) if root is not None else "") or default
