"""Run a copy of a module again, without side effects, to find the operation that made a NaN."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.utils._python_dispatch import _disable_current_modes

from tensortap.adapters.named_values import silent_names
from tensortap.adapters.rng import preserve_rng_state
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.modules.tensors import without_torch_function
from tensortap.adapters.torch.nonfinite.origin import OriginMode
from tensortap.adapters.torch.ops.mode import without_modes

_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_GLOBAL_HOOKS: Final = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def run_again(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OriginMode:
    """Run a copy of a module on copies of its inputs, and return what was found in its operations.

    The module, its inputs, random states, hooks, function modes and recorded values are left alone. It raises when the
    module or an input cannot be copied.
    """
    clone = _copied(module, [value for m in module.modules() for value in vars(m).values()])
    for part in clone.modules():
        for name in _HOOKS:
            vars(part)[name].clear()
    args, kwargs = _copied((args, kwargs), (args, kwargs))
    mode = OriginMode(path, clone)
    with (
        without_modes(),
        _disable_current_modes(),
        torch.no_grad(),
        _no_global_hooks(),
        _random_states(args),
        silent_names(),
        contextlib.suppress(Exception),  # the user's own run raises its own errors
        mode,
    ):
        clone.forward(*args, **kwargs)
    return mode


def _copied(value: Any, searched: Any) -> Any:
    """Return a deep copy. Tensors with a graph cannot be copied: the copy has their values."""
    with without_torch_function():
        tensors = [tensor for _, tensor in tensors_in(searched) if not isinstance(tensor, nn.Parameter)]
        return copy.deepcopy(value, {id(tensor): tensor.detach().clone() for tensor in tensors})


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    hooks: list[dict[int, Any]] = [getattr(module_globals, name) for name in _GLOBAL_HOOKS]
    kept = [dict(entries) for entries in hooks]
    for entries in hooks:
        entries.clear()
    try:
        yield
    finally:
        for entries, items in zip(hooks, kept, strict=True):
            entries.update(items)


@contextlib.contextmanager
def _random_states(given: Any) -> Iterator[None]:
    devices = {t.device.index or 0 for _, t in tensors_in(given) if isinstance(t, Tensor) and t.is_cuda}
    restore = preserve_rng_state()
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            restore()
