"""Decide in which modules operations may be observed: not where a function mode would change what runs.

A mode disables the fused paths of encoder layers and attention, and makes torch.compile compile again. So it is off
there, what runs inside is not observed, and the report at close says so.
"""

from __future__ import annotations

import sys
import weakref
from typing import Final

import torch
from torch import nn

from tensortap.adapters.torch.compile.code import graph_count
from tensortap.adapters.torch.modules.hookset import may_fuse
from tensortap.adapters.torch.modules.tree import is_compiled
from tensortap.adapters.torch.ops.mode import only_ours
from tensortap.record.counters import Counters

COMPILED: Final = "lies in a compiled region, or in the module that calls one, where operations are not seen"
FUSED: Final = (
    "ran fused, as nn.MultiheadAttention and encoder layers do in inference; watch(..., fast_path='leave') shows it, "
    "with other rounding"
)
_LEFT: Final = (
    "does not run fused while its operations are watched (fast_path='leave'): its outputs differ by rounding from "
    "those of the fused path"
)
_FUSING: Final = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class PlainModule:
    """What is known of one module: `is_idle`, it does no operation itself, and at which `generation` it was plain.

    A plain module neither runs fused nor is compiled; a new generation begins when something is compiled.
    """

    __slots__ = ("generation", "is_idle")

    def __init__(self, is_idle: bool) -> None:
        self.generation = -1
        self.is_idle = is_idle


class Visibility:
    """Decide whether the mode may be active in a module that begins to run. `hidden` says why it was not."""

    def __init__(self, counters: Counters, keep_fused: bool) -> None:
        self.hidden = ""
        self._counters = counters
        self._keep = keep_fused
        self._compiled: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._graphs = -1
        self.generation = 0

    def begin(self) -> None:
        """Begin a call of the outermost module: forget which modules are compiled if there are new graphs."""
        made = graph_count()
        if made != self._graphs:
            self._graphs = made
            self._compiled.clear()
            self.generation += 1

    def invalidate(self) -> None:
        """Forget which modules are compiled, before any graph is made."""
        self._graphs = -1
        self.generation += 1

    def allows(self, module: nn.Module, plain: PlainModule | None = None) -> bool:
        """Return whether to observe the operations of a module that is about to run."""
        if "torch._dynamo" in sys.modules and self._calls_compiled(module):
            self.hidden = COMPILED
            return False
        if not isinstance(module, _FUSING):
            if plain is not None:
                plain.generation = self.generation
            return True
        if not only_ours() or not _fuses(module):
            return True
        if self._keep:
            self.hidden = FUSED
        else:
            self._counters.warn("fast_path", f"nn.{type(module).__name__} {_LEFT}")
        return not self._keep

    def _calls_compiled(self, module: nn.Module) -> bool:
        """Return whether it, or a module in it, is compiled: no hook runs when such a module is called."""
        known = self._compiled.get(module)
        if known is None:
            known = self._compiled[module] = any(map(is_compiled, module.modules()))
        return known


def _fuses(module: nn.Module) -> bool:
    if isinstance(module, nn.TransformerEncoderLayer):
        return may_fuse(module)
    if isinstance(module, nn.TransformerEncoder):
        first = next(iter(module.layers), None)
        nested = getattr(module, "use_nested_tensor", False)
        return bool(nested) and isinstance(first, nn.TransformerEncoderLayer) and may_fuse(first)
    return isinstance(module, nn.MultiheadAttention) and _attention_fuses(module)


def _attention_fuses(module: nn.MultiheadAttention) -> bool:
    """Check the conditions of its forward that are known beforehand."""
    if module.training or torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return False
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        return False
    return not (
        not module.batch_first
        or module.num_heads % 2
        or module.in_proj_weight is None
        or module.bias_k is not None
        or module.bias_v is not None
        or module.add_zero_attn
        or not module._qkv_same_embed_dim
    )
