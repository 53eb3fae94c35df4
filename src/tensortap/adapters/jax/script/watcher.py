"""Watch the functions that a script compiles: `jax.jit`, `nnx.jit` and `eqx.filter_jit` while it runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Final

from tensortap.adapters.jax.script.adapter import JaxScriptAdapter
from tensortap.adapters.jax.script.events import OPTIMIZERS
from tensortap.adapters.jax.script.functions import WatchedFunction
from tensortap.adapters.jax.script.steps import ScriptSteps
from tensortap.context.caller import in_library

COMPILERS: Final = {"jax": "jit", "flax.nnx": "jit", "equinox": "filter_jit"}  # module and function


class JaxScriptWatcher:
    """Replace the functions that compile. What libraries compile for themselves is left as it is."""

    def __init__(self, begin: Callable[[JaxScriptAdapter], Any]) -> None:
        self.steps = ScriptSteps(begin)
        self.seen = 0  # functions of the script
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._on = True

    def watch(self, module: str) -> None:
        """Replace the compiler of a library, now that it was imported."""
        if not self._on:
            return
        if module == "optax":
            for name in OPTIMIZERS:
                self._replace(sys.modules[module], name, self._optimizer)
        else:
            self._replace(sys.modules[module], COMPILERS[module], self._compiler)

    def stop(self) -> None:
        """Restore the originals and record the last step. Functions of the script keep working without us."""
        self._on = False
        for owner, name, original, ours in reversed(self._replaced):
            if getattr(owner, name, None) is ours:
                setattr(owner, name, original)
        self.steps.finish()

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            ours = functools.wraps(original)(wrap(original))
            self._replaced.append((owner, name, original, ours))
            setattr(owner, name, ours)

    def _compiler(self, original: Any) -> Any:
        def compile(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if not self._on or in_library(sys._getframe(1).f_code.co_filename) or not callable(made):
                return made
            if not args or not callable(args[0]):  # it waits for the function, as a decorator with options does
                return lambda function: self._watched(made(function))
            return self._watched(made)

        return compile

    def _watched(self, compiled: Any) -> WatchedFunction:
        self.seen += 1
        return WatchedFunction(compiled, self.steps)

    def _optimizer(self, original: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if self._on and not in_library(sys._getframe(1).f_code.co_filename):
                with contextlib.suppress(Exception):
                    bound = inspect.signature(original).bind(*args, **kwargs)
                    bound.apply_defaults()
                    self.steps.events.optimizer(original.__name__, dict(bound.arguments))
            return made

        return make
