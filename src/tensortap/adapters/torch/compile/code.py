"""Find the code of a model that torch.compile has compiled, and reset it so that it is compiled again.

The compiler looks at a module's hooks once, when it compiles: hooks registered later would silently not run. So where a
model was compiled before it was watched, its compiled code is reset, and the next call compiles it with the taps. The
same happens when the taps are removed: no graph with taps remains.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, Final

from torch import nn
from torch._C._dynamo import eval_frame

from tensortap.adapters.torch.compile.operators import CompileStatus
from tensortap.adapters.torch.modules import tree as modules

_SETTING: Final = "skip_nnmodule_hook_guards"
_WRAPS: Final = "external_utils.py"  # of Dynamo: frames around models that are PyTorch's own classes, as Sequential


class ModelCompileStatus(CompileStatus):
    """Tell whether any module of one model runs compiled."""

    def __init__(self, watched: Iterable[nn.Module]) -> None:
        super().__init__()
        self._modules = [weakref.ref(module) for module in watched]
        self._guarded = False

    def guard(self) -> None:
        """Make the compiler guard on modules without hooks, until `release`."""
        if not self._guarded:
            self._guarded = _GUARDS.add(1)

    def release(self) -> None:
        """Restore the compiler's setting."""
        if self._guarded:
            self._guarded = not _GUARDS.add(-1)

    def refresh(self) -> bool:
        """Return whether a module is compiled; asked before a step, until one is."""
        self.compiled = self.due or (_compiler_was_used() and any(map(_is_compiled, self._modules)))
        return self.compiled


class _HookGuards:
    """Change one setting of the compiler while a compiled model is watched.

    By default the compiler does not guard on a module having no hooks. Code compiled for another model of the same
    class would then be reused for the watched one, and its taps would not run.
    """

    def __init__(self) -> None:
        self._users = 0
        self._before = True
        self._lock = threading.Lock()

    def add(self, users: int) -> bool:
        """Add users of the setting; the last one to leave restores it. Return False where there is no such setting."""
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

# The callback that compiles the frames called now; None where the compiler is not active.
compiler_callback: Final = eval_frame.get_eval_frame_callback


def skip_compiling(function: Callable[..., Any], inside: bool = True) -> None:
    """Keep the compiler from compiling a function's frames and, with `inside`, those it calls. It may inline them."""
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, skip if inside else default)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def reset_compiled(root: nn.Module) -> int:
    """Reset the model's compiled code, so that the next call compiles it again; return how many functions were reset.

    Other models of the same classes, and compiled functions in the same files, are compiled again too.
    """
    known = list(_compiled_codes())
    if not known:
        return 0
    files = {_WRAPS, *(code.co_filename for _, module in modules.modules_of(root) for code in _forwards(module))}
    ours = [code for code in known if code.co_filename in files or code.co_filename.endswith(_WRAPS)]
    for code in ours:
        eval_frame.reset_code(code)
    return len(ours)


def graph_count() -> int:
    """Return how many graphs torch.compile has made so far in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _compiler_was_used() -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    backends = getattr(dynamo, "cached_backends", None)  # optimizers add None: their steps must not be compiled
    return backends is None or (bool(backends) and any(backend is not None for backend in backends.values()))


def _is_compiled(module: weakref.ref[nn.Module]) -> bool:
    found = module()
    return found is not None and modules.is_compiled(found)


def _compiled_codes() -> Iterator[CodeType]:
    """Yield all code that has compiled versions: functions, and what follows a graph break in them."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    for ref in [] if dynamo is None else list(dynamo.input_codes.seen):
        code = ref()
        if code is not None and eval_frame._debug_get_cache_entry_list(code):
            yield code


def _forwards(module: nn.Module) -> Iterator[CodeType]:
    """Yield the code of a module's forward and of its decorators."""
    function: Any = getattr(module.forward, "__func__", module.forward)
    for layer in (function, inspect.unwrap(function)):
        if hasattr(layer, "__code__"):
            yield layer.__code__
