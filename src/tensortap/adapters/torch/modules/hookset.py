"""Hooks that go on and off together, so that a step nobody wants runs as if nobody watched."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.torch.modules.hooks import Hook
from tensortap.record.counters import Counters

LEFT: Final = (
    "nn.TransformerEncoderLayer does not run fused while it is watched inside (fast_path='leave'): its outputs differ "
    "by rounding from those of the fused path"
)


def fresh_key() -> int:
    """A key for hooks that nobody else has."""
    return RemovableHandle(OrderedDict()).id


def under(key: int, handle: RemovableHandle, first: bool = False) -> RemovableHandle:
    """The same hook under another key, the same one for every module; `first` of its hooks, if it was put there.

    The compiler notes keys: with one for each module, blocks that are compiled one by one would not share a graph.
    """
    for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = ref()
        if hooks is not None and handle.id in hooks:
            hooks[key] = hooks.pop(handle.id)
            if first and isinstance(hooks, OrderedDict):
                hooks.move_to_end(key, last=False)
    handle.id = key
    return handle


class HookSet:
    """Hooks and the modules they belong to. Keeps no module alive."""

    def __init__(self) -> None:
        self.bits = 0
        self.paths: set[str] = set()
        self._hooks: list[tuple[weakref.ref[nn.Module], Callable[[nn.Module], RemovableHandle]]] = []
        self._handles: list[RemovableHandle] = []
        self._lock = threading.Lock()

    def add(
        self, module: nn.Module, puts: list[Callable[[nn.Module], RemovableHandle]], bits: int, paths: list[str]
    ) -> None:
        """One more module; each of `puts` registers one hook on it."""
        self._hooks += [(weakref.ref(module), put) for put in puts]
        self.bits |= bits
        self.paths.update(paths)

    def adjust(self, armed: int) -> None:
        """On while one of its probes is armed, otherwise off."""
        if not armed & self.bits:
            self.take_off()
        elif not self._handles:
            with self._lock:
                self._handles = self._handles or self._put()

    def take_off(self) -> None:
        """Remove the hooks."""
        if self._handles:
            with self._lock:
                handles, self._handles = self._handles, []
            for handle in handles:
                handle.remove()

    def _put(self) -> list[RemovableHandle]:
        return [put(module) for ref, put in self._hooks if (module := ref()) is not None]


class FusedSet(HookSet):
    """The hooks in and on a TransformerEncoderLayer: any of them would switch its fused path off.

    They are off while the layer may run fused. Whoever calls it, and when: a guard on the layer itself takes them
    off in time, for the layer looks for hooks only after its pre-hooks have run.
    """

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self._layer = weakref.ref(layer)
        self.was_fused = False

    def adjust(self, armed: int) -> None:
        """Off also while the layer may run fused."""
        layer = self._layer()
        fused = layer is not None and may_fuse(layer)
        if fused and armed & self.bits:
            self.was_fused = True
        super().adjust(0 if fused else armed)

    def _put(self) -> list[RemovableHandle]:
        layer = self._layer()
        guard = [] if layer is None else [layer.register_forward_pre_hook(_Guard(self), prepend=True)]
        return guard + super()._put()


class OpenedSet(HookSet):
    """The same hooks where the user prefers to see inside: the layer does not run fused, which is said once."""

    def __init__(self, layer: nn.TransformerEncoderLayer, counters: Counters) -> None:
        super().__init__()
        self._layer = weakref.ref(layer)
        self._counters = counters

    def adjust(self, armed: int) -> None:
        """On while one of its probes is armed."""
        super().adjust(armed)
        layer = self._layer()
        if self._handles and layer is not None and may_fuse(layer):
            self._counters.warn("fast_path", LEFT)


class _Guard(Hook):
    """Sits before an encoder layer that runs in the open, in case it now runs fused."""

    __slots__ = ("hooks",)

    def __init__(self, hooks: FusedSet) -> None:
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and isinstance(module, nn.TransformerEncoderLayer) and may_fuse(module):
            self.hooks.was_fused = True
            self.hooks.take_off()


def may_fuse(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether the layer's next call may take the fused path: what its forward asks, as far as it is known before."""
    if layer.training or not torch.backends.mha.get_fastpath_enabled():
        return False
    if torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()):
        return False
    attention = layer.self_attn
    return not (
        not attention.batch_first
        or attention.in_proj_bias is None
        or attention.num_heads % 2
        or not getattr(layer, "activation_relu_or_gelu", True)
        or layer.norm1.eps != layer.norm2.eps
    )
