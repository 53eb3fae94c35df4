"""Observe code that has no module: the operations in a block of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensortap.adapters.lookup import framework_named
from tensortap.adapters.protocol import Adapter
from tensortap.errors import UnsupportedError
from tensortap.select.probes import Escalation, probe
from tensortap.select.triggers import Trigger
from tensortap.types import Call
from tensortap.watch import Tap, watch


def ops(
    *names: str,
    keep: Any = None,
    when: Trigger | Callable[..., bool] | None = None,
    where: Callable[[Call], bool] | None = None,
    escalate: Escalation | None = None,
    to: Any = None,
    **options: Any,
) -> Tap:
    """Observe the operations of PyTorch that this thread runs inside the block: those named, or all.

    >>> import torch, tensortap as tt
    >>> memory = tt.Memory()
    >>> with tt.ops("matmul", "@softmax", to=memory) as tap:
    ...     scores = torch.ones(2, 3) @ torch.ones(3, 2)
    ...     weights = scores.softmax(-1)
    >>> [(str(record.place), record["max"]) for record in memory.records]
    [('/matmul#0:output', 3.0), ('/softmax#0:output', 0.5)]

    A name is as in a pattern after `op:`; with a port, `matmul:input`. The block is one step, unless `tap.step()`
    divides it; operations are numbered within a step. `options` are those of `watch`.
    """
    sites = [name if "/" in name or name.startswith("op:") else f"op:{name}" for name in names or ("*",)]
    return watch(_adapter(), probe(*sites, keep=keep, when=when, where=where, escalate=escalate), to=to, **options)


def _adapter() -> Adapter:
    try:
        return framework_named("torch").function_adapter(None)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UnsupportedError("ops() observes operations of PyTorch, which is not installed") from error
