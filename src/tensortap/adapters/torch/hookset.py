"""Hooks that go on and off together, so that a step nobody wants runs as if nobody watched."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.torch.hooks import ForwardHook


class HookSet:
    """Forward hooks and the modules they belong to. Keeps no module alive."""

    def __init__(self) -> None:
        self.bits = 0
        self._hooks: list[tuple[weakref.ref[nn.Module], ForwardHook]] = []
        self._handles: list[RemovableHandle] = []

    def __len__(self) -> int:
        return len(self._hooks)

    @property
    def paths(self) -> set[str]:
        """The names of the modules in it."""
        return {port.path for _, hook in self._hooks for port in hook.ports()}

    def add(self, module: nn.Module, hook: ForwardHook) -> None:
        """One more hook, not yet on."""
        self._hooks.append((weakref.ref(module), hook))
        self.bits |= hook.bits

    def adjust(self, armed: int) -> None:
        """On while one of its probes is armed, otherwise off."""
        if not armed & self.bits:
            self.take_off()
        elif not self._handles:
            self._handles = [
                module.register_forward_hook(hook, with_kwargs=True)
                for ref, hook in self._hooks
                if (module := ref()) is not None
            ]

    def take_off(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class FusedSet(HookSet):
    """The hooks in and on a TransformerEncoderLayer: any of them would switch its fused path off."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self._layer = weakref.ref(layer)
        self.was_fused = False

    def adjust(self, armed: int) -> None:
        """Off also while the layer may run fused."""
        layer = self._layer()
        fused = layer is not None and _may_fuse(layer)
        self.was_fused |= fused and bool(armed & self.bits)
        super().adjust(0 if fused else armed)


def _may_fuse(layer: nn.TransformerEncoderLayer) -> bool:
    if layer.training:
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()))
