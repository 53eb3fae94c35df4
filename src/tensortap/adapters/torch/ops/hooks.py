"""Hooks that tell which module is running, so that an operation's site lies under the module that called it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.torch.autograd.gradients import backward_task
from tensortap.adapters.torch.compile.code import compiler_callback, skip_compiling
from tensortap.adapters.torch.distributed.fully_shard import is_sharded
from tensortap.adapters.torch.modules import tree as modules
from tensortap.adapters.torch.modules.hooks import Hook, is_tracing
from tensortap.adapters.torch.modules.hookset import HookSet, Register, rekey
from tensortap.adapters.torch.modules.placement import enclosing
from tensortap.adapters.torch.modules.tensors import answered_in_c
from tensortap.adapters.torch.ops.names import operations_of
from tensortap.adapters.torch.ops.taps import OpTaps, wants_nothing_of
from tensortap.adapters.torch.ops.visibility import COMPILED, PlainModule
from tensortap.adapters.torch.steps import running_twice
from tensortap.reduce import kernel as kernels


@answered_in_c
class ModuleEnterHook(Hook, kernels.ScopeHook):
    """Report that a module begins to run.

    With `hides_hooks` operations of hooks registered earlier are not observed: FSDP gathers parameters in them.
    """

    __slots__ = ("hides_hooks", "is_root", "paths", "plain", "taps")

    def __init__(self, taps: OpTaps, paths: Sequence[str], is_root: bool, module: nn.Module) -> None:
        self.hides_hooks = is_sharded(module)
        self.taps = taps
        self.paths = tuple(paths)
        self.is_root = is_root
        self.plain = PlainModule(type(module) is nn.Sequential and operations_of(module) == ())
        ordinary = not (is_root or self.hides_hooks or len(self.paths) > 1)
        reader = taps.reader if ordinary else None
        self.connect(reader, ModuleEnterHook.__call__, taps.running, taps.visibility, None)

    def registers(self) -> list[Register]:
        """Return what registers it and its exit hook. On the root it comes after the hook that finds steps."""
        first, exit_hook = not self.is_root, ModuleExitHook(self)
        before, after = self.taps.keys[:2]
        return [
            lambda module: rekey(before, module.register_forward_pre_hook(self, prepend=first), first),
            *(self._visibility_registers() if self.hides_hooks else ()),
            lambda module: rekey(after, module.register_forward_hook(exit_hook, always_call=True)),
        ]

    def _visibility_registers(self) -> list[Register]:
        show, hide = VisibilityHook(self, show=True), VisibilityHook(self, show=False)
        before, after = self.taps.keys[2:]
        return [
            lambda module: rekey(before, module.register_forward_pre_hook(show)),
            lambda module: rekey(after, module.register_forward_hook(hide, prepend=True), True),
        ]

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Report the module, unless the compiler is about to trace it."""
        if is_compiling() or is_tracing():
            return
        if callable(compiler_callback()):  # it would compile the function mode with the forward
            self.taps.visibility.hidden = COMPILED
            return
        self.enter(module)

    def enter(self, module: nn.Module) -> None:
        """Report that the module begins to run."""
        taps = self.taps
        try:
            if self.is_root and not taps.idle() and backward_task() == -1 and not running_twice(module):
                taps.drop()
            path = self.paths[0] if len(self.paths) == 1 else self._path()
            call = taps.enter(self, path, module, plain=self.plain)
            if call is not None and self.plain.generation == taps.visibility.generation:
                self.use_call(call, self.plain.generation)
            if self.hides_hooks:
                taps.show(self, None)
        except Exception as error:
            taps.observer.recorder.counters.failed("step_errors", "looking into a module", error)

    def _path(self) -> str:
        """Return the path of a shared module that lies under the module that runs it."""
        parent = self.taps.parent()
        below = [path for path in self.paths if parent and path.startswith(f"{parent}.")]
        return [*below, *self.paths][0]


skip_compiling(vars(ModuleEnterHook)["__call__"], inside=False)  # it must be able to ask whether the compiler is active


@answered_in_c
class ModuleExitHook(Hook, kernels.ScopeHook):
    """Report that a module has run, also when it failed."""

    __slots__ = ("enter_hook",)

    def __init__(self, enter_hook: ModuleEnterHook) -> None:
        self.enter_hook = enter_hook
        taps = enter_hook.taps
        self.connect(taps.reader, ModuleExitHook.__call__, taps.running, taps.visibility, enter_hook)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Report the module."""
        if not is_compiling():
            self.enter_hook.taps.leave(self.enter_hook)


class VisibilityHook(Hook):
    """Begin or stop observing operations around the module's own forward."""

    __slots__ = ("enter_hook", "show")

    def __init__(self, enter_hook: ModuleEnterHook, show: bool) -> None:
        self.enter_hook = enter_hook
        self.show = show

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Show or hide the operations that follow."""
        if not is_compiling():
            self.enter_hook.taps.show(self.enter_hook, module if self.show else None)


class EncoderLayerHooks:
    """Report encoder layers by global hooks: with a hook on itself, a layer would not run fused."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[weakref.ref[nn.Module], ModuleEnterHook, ModuleExitHook]] = {}

    def add(self, layer: nn.Module, enter_hook: ModuleEnterHook) -> None:
        """Add a layer."""
        self._layers[id(layer)] = (weakref.ref(layer), enter_hook, ModuleExitHook(enter_hook))

    def registers(self) -> list[Register]:
        """Return what registers both hooks."""
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


def place_hooks(
    taps: OpTaps, root: nn.Module, names: Mapping[nn.Module, list[str]], fused: Mapping[str, HookSet]
) -> tuple[HookSet, list[RemovableHandle]]:
    """Place the hooks on a model: return a set for the modules, and handles of those registered on the root at once.

    `names` are the tappable modules with their paths. Hooks of modules inside encoder layers, `fused` by path, go into
    the layers' sets.
    """
    around, layers = HookSet(), EncoderLayerHooks()
    handles: list[RemovableHandle] = []
    compiled = modules.compiled_paths(root)
    patterns = {pattern.op: pattern for pattern in taps.patterns}.values()  # one for each kind of operation
    for module, paths in names.items():
        if compiled.issuperset(paths):
            taps.visibility.hidden = COMPILED
            continue
        if module is not root and wants_nothing_of(module, patterns):
            continue
        enter_hook = ModuleEnterHook(taps, paths, module is root, module)
        if any(path in fused for path in paths):
            layers.add(module, enter_hook)
        elif module is root:
            handles += [register(root) for register in enter_hook.registers()]
        else:
            inside = enclosing(paths, fused) or around
            inside.add(module, enter_hook.registers(), taps.bits, paths)
    if "" in fused:
        handles += [register(root) for register in layers.registers()]
    elif fused:
        around.add(root, layers.registers(), taps.bits, [])
    return around, handles
