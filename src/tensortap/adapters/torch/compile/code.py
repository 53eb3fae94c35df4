"""Which of a model's code torch.compile has compiled, and having it compiled anew.

The compiler looks at a module's hooks when it compiles, and a module that had none it never asks again: hooks that are
put on later would be passed by in silence. So where a model was compiled before it was watched, what was compiled of
it is forgotten, and its next call compiles it with the taps. The same when they come off: no graph with taps remains.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Final

from torch import nn
from torch._C._dynamo import eval_frame

from tensortap.adapters.torch.compile.operators import Regions
from tensortap.adapters.torch.modules import tree as modules

_SETTING: Final = "skip_nnmodule_hook_guards"
_WRAPS: Final = "external_utils.py"  # of Dynamo: frames around models that are PyTorch's own classes, as Sequential


class ModelRegions(Regions):
    """Whether anything of one model runs compiled."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._modules = [weakref.ref(module) for _, module in modules.modules_of(root)]
        self._guarded = False

    def guard(self) -> None:
        """From now on have the compiler note which modules have no hooks, until `release`."""
        if not self._guarded:
            self._guarded = _GUARDS.add(1)

    def release(self) -> None:
        """The taps are off."""
        if self._guarded:
            self._guarded = not _GUARDS.add(-1)

    def look(self) -> bool:
        """Ask before a step, while nothing is known to be compiled. True when something is."""
        self.compiled = self.due or (_anything() and any(map(_is_compiled, self._modules)))
        return self.compiled


class _HookGuards:
    """A setting of the compiler's, changed while a tap is on anything compiled.

    By default it does not note that a module had no hooks when it was compiled. Code compiled for another model of the
    same class would then do for the watched one, and its taps be passed by.
    """

    def __init__(self) -> None:
        self._users = 0
        self._before = True
        self._lock = threading.Lock()

    def add(self, users: int) -> bool:
        """So many more users of the setting; the last one to go puts it back. False where there is no such setting."""
        config: Any = sys.modules.get("torch._dynamo.config")
        if not hasattr(config, _SETTING):
            return False
        with self._lock:
            if not self._users:
                self._before = getattr(config, _SETTING)
            self._users += users
            setattr(config, _SETTING, False if self._users else self._before)
        return True


_GUARDS: Final = _HookGuards()

# What compiles the frames that are called now; nothing where the compiler is not at work, and in what it passes by.
compiler: Final = eval_frame.get_eval_frame_callback


def pass_by(function: Callable[..., Any], inside: bool = True) -> None:
    """Have the compiler compile neither a function's calls nor, `inside`, what it calls. It may still follow them."""
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, skip if inside else default)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def forget(root: nn.Module) -> int:
    """Have the model's next call compiled anew, if it was compiled; how many functions that concerns.

    Other models of the same classes, and compiled functions in the same files, are compiled anew too.
    """
    known = list(_compiled_codes())
    if not known:
        return 0
    files = {_WRAPS, *(code.co_filename for _, module in modules.modules_of(root) for code in _forwards(module))}
    ours = [code for code in known if code.co_filename in files or code.co_filename.endswith(_WRAPS)]
    for code in ours:
        eval_frame.reset_code(code)
    return len(ours)


def graphs() -> int:
    """How many graphs torch.compile has made so far in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _anything() -> bool:
    """Whether torch.compile was used at all."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", None)  # optimizers add None: what they do is not to be compiled
    return dynamo is not None and (backends is None or any(backend is not None for backend in backends.values()))


def _is_compiled(module: weakref.ref[nn.Module]) -> bool:
    found = module()
    return found is not None and modules.is_compiled(found)


def _compiled_codes() -> Iterator[CodeType]:
    """Everything that has compiled versions: functions, and what follows a graph break in them."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    for ref in [] if dynamo is None else list(dynamo.input_codes.seen):
        code = ref()
        if code is not None and eval_frame._debug_get_cache_entry_list(code):
            yield code


def _forwards(module: nn.Module) -> Iterator[CodeType]:
    """The code of a module's forward, with what decorators put around it."""
    function: Any = getattr(module.forward, "__func__", module.forward)
    for layer in (function, inspect.unwrap(function)):
        if hasattr(layer, "__code__"):
            yield layer.__code__
