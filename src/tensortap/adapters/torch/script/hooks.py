"""Hooks on every module of the process, and after a model's forward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.torch.modules.hidden import hide_flags
from tensortap.adapters.torch.modules.hooks import Hook
from tensortap.adapters.torch.modules.roots import RootForwardPreHook


class GlobalPreHook:
    """A pre-hook on every module that can be switched off while a known model runs, which then costs nothing."""

    def __init__(self, hook: Callable[[nn.Module, Any], None]) -> None:
        self._hook = hook
        self.handle = register_module_forward_pre_hook(hook)

    def switch(self, on: bool) -> None:
        """Switch the hook on or off; nothing after `handle.remove()`."""
        hooks = self.handle.hooks_dict_ref()
        if hooks is None:
            return
        if on:
            hooks.setdefault(self.handle.id, self._hook)
        else:
            hooks.pop(self.handle.id, None)  # another thread may have done it already


class AfterCall(Hook):
    """Call a function when a model's forward is over, also when it failed."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Run after the module's forward."""
        if not torch.compiler.is_compiling():
            self.callback()


def register_after(module: nn.Module, hook: AfterCall) -> RemovableHandle:
    """Put the hook after a module's forward."""
    if not isinstance(module, nn.TransformerEncoderLayer):
        return hide_flags(module.register_forward_hook(hook, always_call=True))
    this = weakref.ref(module)  # a hook on the layer itself would switch its fused path off

    def only_this(called: nn.Module, args: Any, output: Any) -> None:
        if called is this():
            hook(called, args, output)

    return register_module_forward_hook(only_this, always_call=True)


def begin_early(module: nn.Module, keys: list[int]) -> None:
    """Begin a call's step where another thread has put the hooks on while the call began.

    PyTorch gathers the hooks of a call before it runs the first one, so nobody knows whether ours are among them.
    """
    for key in keys:
        hook = module._forward_pre_hooks.get(key)
        if isinstance(hook, RootForwardPreHook):
            hook.receiver.begin(module, early=True)


def run_pre_hook(module: nn.Module, key: int, args: Any) -> None:
    """Run a pre-hook that was added while the module is being called: PyTorch runs it from the next call on."""
    hook = module._forward_pre_hooks[key]
    if key not in module._forward_pre_hooks_with_kwargs:
        hook(module, args)
        return
    caller = sys._getframe(2)  # PyTorch's own, which alone knows the keyword arguments
    hook(module, args, caller.f_locals.get("kwargs", {}))
