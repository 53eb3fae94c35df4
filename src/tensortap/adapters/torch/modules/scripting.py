"""Let `torch.jit.script` compile a watched model as if it were not watched.

TorchScript compiles the hooks that it finds on a module, and refuses any that is not written in its language. There
is no flag for a hook to be left out, so the function that compiles a module is wrapped while a tap is attached: it
sees the module without our hooks. The hooks of others stay, and are compiled or refused as without us.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.jit import _recursive

_LOCK = threading.RLock()
_taps = 0
_original: Callable[..., Any] | None = None


class ScriptingHandle:
    """Keep models scriptable until `remove()` is called."""

    def __init__(self) -> None:
        global _taps, _original
        self._on = True
        with _LOCK:
            _taps += 1
            if _original is None:
                _original = _recursive.create_script_module
                _recursive.create_script_module = _create_script_module

    def remove(self) -> None:
        """Undo it; with the last tap, PyTorch's own function is put back. A second call does nothing."""
        global _taps, _original
        with _LOCK:
            _taps -= self._on
            self._on = False
            if not _taps and _recursive.create_script_module is _create_script_module:
                assert _original is not None
                _recursive.create_script_module, _original = _original, None


def _create_script_module(
    nn_module: nn.Module, stubs_fn: Any, share_types: bool = True, is_tracing: bool = False
) -> Any:
    create = _original
    assert create is not None
    if is_tracing:  # then hooks are just called
        return create(nn_module, stubs_fn, share_types, is_tracing)
    with _without_our_hooks(nn_module):
        return create(nn_module, stubs_fn, share_types, is_tracing)


@contextlib.contextmanager
def _without_our_hooks(root: nn.Module) -> Iterator[None]:
    found = [hooks for module in root.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    before = [(hooks, list(hooks.items())) for hooks in found if any(_is_ours(hook) for hook in hooks.values())]
    for hooks, items in before:
        for number, hook in items:
            if _is_ours(hook):
                del hooks[number]
    try:
        yield
    finally:
        for hooks, items in before:  # in place and in their order: others hold references to these dictionaries
            hooks.clear()
            hooks.update(items)


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.split(".")[0] == "tensortap"
