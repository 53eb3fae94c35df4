"""Hooks that are registered and removed together, so that a step no probe wants runs without any."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.torch.modules.hidden import hide_flags
from tensortap.adapters.torch.modules.hooks import Hook
from tensortap.record.counters import Counters

LEFT: Final = (
    "nn.TransformerEncoderLayer does not run fused while it is watched inside (fast_path='leave'): its outputs differ "
    "by rounding from those of the fused path"
)
_REGISTER: Final = nn.Module.register_forward_hook

Register = Callable[[nn.Module], RemovableHandle]  # registers one hook on a module


def new_hook_key() -> int:
    """Return a key that no registered hook has."""
    return RemovableHandle(OrderedDict()).id


def rekey(key: int, handle: RemovableHandle, first: bool = False) -> RemovableHandle:
    """Move a registered hook to another key; `first` keeps it the first of its module's hooks.

    The compiler guards on keys: with a key for each module, blocks compiled one by one would not share a graph.
    """
    for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = ref()
        if hooks is not None and handle.id in hooks:
            hooks[key] = hooks.pop(handle.id)
            if first and isinstance(hooks, OrderedDict):
                hooks.move_to_end(key, last=False)
    handle.id = key
    return hide_flags(handle)


def register_before(module: nn.Module, hook: Any, key: int) -> RemovableHandle:
    """Register a hook that is told a module's inputs."""
    return rekey(key, module.register_forward_pre_hook(hook, with_kwargs=True))


def register_after(module: nn.Module, hook: Any, key: int, always_call: bool = False) -> RemovableHandle:
    """Register a hook that is told a module's output.

    Most hooks need no flag. They go into the module's dict under their key at once, as `register_forward_hook` would
    do it: a handle that knows the dicts of flags takes longer to make than all the rest.
    """
    if always_call or type(module).register_forward_hook is not _REGISTER:
        return rekey(key, module.register_forward_hook(hook, always_call=always_call))
    module._forward_hooks[key] = hook
    handle = RemovableHandle(module._forward_hooks)
    handle.id = key
    return handle


class HookSet:
    """Hooks and the modules they belong to. It keeps no module alive.

    `was_fused` tells whether a layer ran fused while one of the hooks was wanted.
    """

    was_fused = False

    def __init__(self) -> None:
        self.bits = 0
        self.paths: set[str] = set()
        self._hooks: list[tuple[weakref.ref[nn.Module], Register]] = []
        self._handles: list[RemovableHandle] = []
        self._lock = threading.RLock()  # a signal handler may come in between

    def add(self, module: nn.Module, registers: list[Register], bits: int, paths: list[str]) -> None:
        """Add a module with the functions that each register one hook on it."""
        self._hooks += [(weakref.ref(module), register) for register in registers]
        if self._handles:
            self._handles += [register(module) for register in registers]
        self.bits |= bits
        self.paths.update(paths)

    def adjust(self, armed: int) -> None:
        """Register the hooks while one of their probes is armed, otherwise remove them."""
        if not armed & self.bits:
            self.remove()
        elif not self._handles:
            with self._lock:
                self._handles = self._handles or self._register()

    def remove(self) -> None:
        """Remove the hooks from their modules."""
        if self._handles:
            with self._lock:
                handles, self._handles = self._handles, []
            for handle in handles:
                handle.remove()

    def _register(self) -> list[RemovableHandle]:
        return [register(module) for ref, register in self._hooks if (module := ref()) is not None]


class FusedLayerHooks(HookSet):
    """Hooks in and on a TransformerEncoderLayer, any of which would disable its fused path.

    They are removed while the layer may run fused: a guard on the layer itself removes them in time, because the layer
    looks for hooks only after its pre-hooks have run.
    """

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self._layer = weakref.ref(layer)

    def adjust(self, armed: int) -> None:
        """Remove the hooks also while the layer may run fused."""
        layer = self._layer()
        fused = layer is not None and may_fuse(layer)
        if fused and armed & self.bits:
            self.was_fused = True
        super().adjust(0 if fused else armed)

    def _register(self) -> list[RemovableHandle]:
        layer = self._layer()
        guard = [] if layer is None else [layer.register_forward_pre_hook(_FusedPathGuard(self), prepend=True)]
        return guard + super()._register()


class UnfusedLayerHooks(HookSet):
    """The same hooks if the user wants to see inside the layer: it then does not run fused, and a warning
    says so once.
    """

    def __init__(self, layer: nn.TransformerEncoderLayer, counters: Counters) -> None:
        super().__init__()
        self._layer = weakref.ref(layer)
        self._counters = counters

    def adjust(self, armed: int) -> None:
        """Register the hooks while one of their probes is armed."""
        super().adjust(armed)
        layer = self._layer()
        if self._handles and layer is not None and may_fuse(layer):
            self._counters.warn("fast_path", LEFT)


class _FusedPathGuard(Hook):
    """Remove the hooks of an encoder layer before a call that may run fused."""

    __slots__ = ("hooks",)

    def __init__(self, hooks: FusedLayerHooks) -> None:
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and isinstance(module, nn.TransformerEncoderLayer) and may_fuse(module):
            self.hooks.was_fused = True
            self.hooks.remove()


def may_fuse(layer: nn.TransformerEncoderLayer) -> bool:
    """Return whether the layer's next call may run fused: the conditions of its forward that are known beforehand."""
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
