"""Parameters under `fully_shard`: gradients that wait between micro-batches, and each parameter's shard."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any, Final

from torch import distributed, nn

from tensortap.adapters.torch.distributed.world import AVAILABLE

# Where `fully_shard` is defined, now and before PyTorch 2.6.
_MODULES: Final = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")


class FullyShardedParameters:
    """Read FSDP2's state of a model's parameters. It does not keep the model alive."""

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._groups: list[weakref.ref[Any]] = []
        self.refresh()

    def refresh(self) -> None:
        """Find the sharded modules. Nothing is walked without a process group, nor before `fully_shard` is imported."""
        root = self._root()
        imported = any(name in sys.modules for name in _MODULES)
        there = root is not None and imported and AVAILABLE and distributed.is_initialized()
        self._groups = [weakref.ref(group) for group in _groups_of(root)] if root is not None and there else []

    def pending(self) -> bool:
        """Return whether gradients wait unsharded for the micro-batch that will reduce them."""
        return any(_waits(parameter) for parameter in self._parameters())

    def shards(self) -> dict[int, nn.Parameter]:
        """Return this rank's shards by the ids of the whole parameters that currently replace them."""
        held = ((getattr(parameter, "_unsharded_param", None), parameter) for parameter in self._parameters())
        return {id(whole): parameter.sharded_param for whole, parameter in held if whole is not None}

    def _parameters(self) -> Iterator[Any]:
        for reference in self._groups:
            group = reference()
            if group is not None:
                yield from group.fsdp_params


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers the module's parameters before it runs, and frees them after."""
    return hasattr(module, "_get_fsdp_state")


def _groups_of(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        state = getattr(module, "_get_fsdp_state", None) if hasattr(type(module), "_get_fsdp_state") else None
        yield from _groups(state()) if state is not None else ()


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None) if groups is None else None  # before PyTorch 2.12
    return list(groups or ([] if one is None else [one]))


def _waits(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
