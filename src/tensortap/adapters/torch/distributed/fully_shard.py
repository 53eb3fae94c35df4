"""Parameters under `fully_shard`: gradients that wait between micro-batches, and each parameter's shard."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn


class FullyShardedParameters:
    """Read what FSDP2 keeps beside a model's parameters. It does not keep the model alive."""

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)

    def pending(self) -> bool:
        """Return whether gradients wait unsharded for the micro-batch that will reduce them."""
        return any(_waits(parameter) for parameter in self._parameters())

    def shard(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's shard of a parameter; after a forward FSDP may still have the whole one in its place."""
        for held in self._parameters():
            if getattr(held, "_unsharded_param", None) is parameter:
                found: nn.Parameter = held.sharded_param
                return found
        return parameter

    def _parameters(self) -> Iterator[Any]:
        root = self._root()
        for module in root.modules() if root is not None else ():
            state = getattr(module, "_get_fsdp_state", None)
            for group in _groups(state()) if state is not None else ():
                yield from group.fsdp_params


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers the module's parameters before it runs, and frees them after."""
    return hasattr(module, "_get_fsdp_state")


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None) if groups is None else None  # before PyTorch 2.12
    return list(groups or ([] if one is None else [one]))


def _waits(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
