"""Keep our hooks out of pickles, copies and TorchScript, so that they are the same as for an unwatched model.

PyTorch keeps a module's hooks in OrderedDicts of the module. `copyreg` lets anyone say how objects of a class are
reduced, and pickle, copy.deepcopy, torch.save, multiprocessing and cloudpickle all ask it. While a model is watched,
OrderedDicts are reduced as always but without our entries. torch.jit.script reads the dicts directly; for its time our
hooks are taken out of them.
"""

from __future__ import annotations

import contextlib
import copyreg
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_HOOK_DICTS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_JIT: Final[Any] = torch.jit._recursive
_CREATE: Final = "create_script_module"  # what torch.jit.script and torch.jit.trace look up when they are called


class HiddenEntry:
    """A value that is left out of pickles, copies and scripted modules: our hooks, and the flags beside them."""

    __slots__ = ()


_FLAG: Final = HiddenEntry()


def hide_flags(handle: RemovableHandle) -> RemovableHandle:
    """Hide the flags of a registered hook (`with_kwargs`, `always_call`), which PyTorch keeps as True by its key."""
    for ref in handle.extra_dict_ref:
        flags = ref()
        if flags is not None and handle.id in flags:
            flags[handle.id] = _FLAG
    return handle


class _Hiding:
    """Install the reducer and the wrapper for the first watched model, and remove them after the last."""

    def __init__(self) -> None:
        self._models = 0
        self._lock = threading.RLock()  # a signal handler may come in between
        self._reduce: Callable[[Any], Any] | None = None
        self._create: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Count a model that is watched from now on."""
        with self._lock:
            self._models += 1
            if self._models == 1:
                self._reduce = copyreg.dispatch_table.get(OrderedDict)  # another library's reducer, if there is one
                self._create = getattr(_JIT, _CREATE)
                copyreg.dispatch_table[OrderedDict] = self._reduce_visible
                setattr(_JIT, _CREATE, self._create_script_module)

    def end(self) -> None:
        """Count one less."""
        with self._lock:
            self._models -= 1
            if self._models:
                return
            if copyreg.dispatch_table.get(OrderedDict) == self._reduce_visible:
                del copyreg.dispatch_table[OrderedDict]
                if self._reduce is not None:
                    copyreg.dispatch_table[OrderedDict] = self._reduce
            if getattr(_JIT, _CREATE) == self._create_script_module:
                setattr(_JIT, _CREATE, self._create)

    def _reduce_visible(self, value: OrderedDict[Any, Any]) -> Any:
        reduced = value.__reduce_ex__(2) if self._reduce is None else self._reduce(value)
        if not any(isinstance(entry, HiddenEntry) for entry in value.values()):
            return reduced
        visible = [item for item in value.items() if not isinstance(item[1], HiddenEntry)]
        return *reduced[:4], iter(visible), *reduced[5:]

    def _create_script_module(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert self._create is not None
        with _taken_out(module):
            return self._create(module, *args, **kwargs)


HIDING: Final = _Hiding()


@contextlib.contextmanager
def _taken_out(root: nn.Module) -> Iterator[None]:
    dicts = [vars(module).get(name) for module in root.modules() for name in _HOOK_DICTS]
    taken = [(hooks, list(hooks.items())) for hooks in dicts if hooks and _has_hidden(hooks)]
    for hooks, items in taken:
        for key, entry in items:
            if isinstance(entry, HiddenEntry):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, items in taken:
            added = [item for item in hooks.items() if item not in items]
            hooks.clear()
            hooks.update([*items, *added])


def _has_hidden(hooks: OrderedDict[int, Any]) -> bool:
    return any(isinstance(entry, HiddenEntry) for entry in hooks.values())
