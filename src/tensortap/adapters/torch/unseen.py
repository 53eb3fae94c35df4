"""Why what was wanted was never seen."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Final

from torch import nn

from tensortap.adapters.base import Port
from tensortap.adapters.torch import modules
from tensortap.adapters.torch.params import NO_OPTIMIZER

NEVER: Final = "never ran in a step that was observed"
MAYBE_COMPILED: Final = "never ran, unless inside a region that torch.compile made, where hooks do not run"
FUSED: Final = (
    "ran fused inside nn.TransformerEncoderLayer; watch(..., fast_path='leave') shows it, with other rounding"
)
NOT_CALLED: Final = (
    "parts of the watched model ran, but the model itself was never called (a direct .forward() call passes hooks "
    "by), so no step could be found: close each with tap.step()"
)


def explain(ports: Iterable[Port], root: nn.Module | None, fused: Collection[str], compiled: int) -> dict[str, str]:
    """The ports that saw nothing, each with the reason where it is known."""
    default = MAYBE_COMPILED if compiled_graphs() > compiled else NEVER
    return {f"{port.path}:{port.port}": _why(port, root, fused, default) for port in ports if not port.seen}


def compiled_graphs() -> int:
    """How many graphs torch.compile has made so far in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _why(port: Port, root: nn.Module | None, fused: Collection[str], default: str) -> str:
    if port.note:
        return port.note
    if port.port in modules.PARAMETER_PORTS:
        return NO_OPTIMIZER if port.port == "update" else NEVER
    if port.path in fused:
        return FUSED
    return (modules.why_unseen(root, port.path) if root is not None else "") or default
