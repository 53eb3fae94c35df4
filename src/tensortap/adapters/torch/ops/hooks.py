"""The hooks that tell which module is running, so that an operation has a site under the one that called it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.torch.autograd.gradients import backward_task
from tensortap.adapters.torch.compile.code import compiler, pass_by
from tensortap.adapters.torch.modules.hooks import Hook, tracing
from tensortap.adapters.torch.modules.hookset import under
from tensortap.adapters.torch.ops.taps import OpTaps
from tensortap.adapters.torch.ops.visibility import COMPILED
from tensortap.adapters.torch.steps import running_twice


class Entering(Hook):
    """Sits before a module and says that it begins to run.

    With `veiled` it looks away while hooks that were there before it run: what shards the module does its work there.
    """

    __slots__ = ("is_root", "paths", "taps", "veiled")

    def __init__(self, taps: OpTaps, paths: Sequence[str], is_root: bool, veiled: bool) -> None:
        self.veiled = veiled
        self.taps = taps
        self.paths = tuple(paths)
        self.is_root = is_root

    def puts(self) -> list[Callable[[nn.Module], RemovableHandle]]:
        """How to put it, and its counterpart, on the module. On the root it comes after the hook that finds steps."""
        first, leaving = not self.is_root, Leaving(self)
        before, after = self.taps.keys[:2]
        return [
            lambda module: under(before, module.register_forward_pre_hook(self, prepend=first), first),
            *(self._veils() if self.veiled else ()),
            lambda module: under(after, module.register_forward_hook(leaving, always_call=True)),
        ]

    def _veils(self) -> list[Callable[[nn.Module], RemovableHandle]]:
        show, hide = Veil(self, show=True), Veil(self, show=False)
        before, after = self.taps.keys[2:]
        return [
            lambda module: under(before, module.register_forward_pre_hook(show)),
            lambda module: under(after, module.register_forward_hook(hide, prepend=True), True),
        ]

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before the forward."""
        if is_compiling() or tracing():
            return
        if callable(compiler()):  # it is about to take the forward, and would take the mode with it
            self.taps.visibility.hidden = COMPILED
            return
        self.enter(module)

    def enter(self, module: nn.Module) -> None:
        """The module begins to run."""
        taps = self.taps
        try:
            if self.is_root and not taps.idle() and backward_task() == -1 and not running_twice(module):
                taps.drop()
            taps.enter(self, self.paths[0] if len(self.paths) == 1 else self._path(), module)
            if self.veiled:
                taps.show(self, None)
        except Exception as error:
            taps.observer.recorder.counters.failed("step_errors", "looking into a module", error)

    def _path(self) -> str:
        """Of a shared module's names the one under the module that runs it."""
        parent = self.taps.parent()
        below = [path for path in self.paths if parent and path.startswith(f"{parent}.")]
        return [*below, *self.paths][0]


pass_by(Entering.__call__, inside=False)  # it must see the compiler at work


class Leaving(Hook):
    """Sits after a module, also when it failed."""

    __slots__ = ("entering",)

    def __init__(self, entering: Entering) -> None:
        self.entering = entering

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward."""
        if not is_compiling():
            self.entering.taps.leave(self.entering)


class Veil(Hook):
    """Sits where the module's own work begins or ends."""

    __slots__ = ("entering", "show")

    def __init__(self, entering: Entering, show: bool) -> None:
        self.entering = entering
        self.show = show

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Before or after the forward."""
        if not is_compiling():
            self.entering.taps.show(self.entering, module if self.show else None)


class LayerHooks:
    """Enters and leaves encoder layers by hooks on all modules: with a hook on itself, a layer would not run fused."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[weakref.ref[nn.Module], Entering, Leaving]] = {}

    def add(self, layer: nn.Module, entering: Entering) -> None:
        """One more layer."""
        self._layers[id(layer)] = (weakref.ref(layer), entering, Leaving(entering))

    def puts(self) -> list[Callable[[nn.Module], RemovableHandle]]:
        """How to put both hooks on."""
        return [
            lambda _: register_module_forward_pre_hook(self._before),
            lambda _: register_module_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any) -> None:
        known = self._layers.get(id(module))
        if known is not None and known[0]() is module:
            known[1](module, args)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        known = self._layers.get(id(module))
        if known is not None and known[0]() is module:
            known[2](module, args, output)
