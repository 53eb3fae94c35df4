"""Choose the hooks of each module from what the probes want, and register them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.nested import names_of
from tensortap.adapters.plan import Plan, Port, bits_of
from tensortap.adapters.torch.autograd.gradients import CallStack
from tensortap.adapters.torch.compile.operators import CompileStatus
from tensortap.adapters.torch.modules import tree as modules
from tensortap.adapters.torch.modules.hidden import hide_flags
from tensortap.adapters.torch.modules.hooks import ForwardHook, ForwardPreHook, OutputHook
from tensortap.adapters.torch.modules.hookset import Register, new_hook_key, rekey
from tensortap.adapters.torch.modules.roots import RootForwardHook, RootForwardPreHook
from tensortap.adapters.torch.modules.tensors import TensorObserver
from tensortap.adapters.torch.nonfinite.finder import OriginFinder, OriginHook
from tensortap.adapters.torch.steps import TorchStepDetector
from tensortap.select.ports import MODULE_PORTS

T = TypeVar("T")


class HookPlacement:
    """Make the hooks of one tap, and keep the ports that they serve."""

    def __init__(
        self,
        observer: TensorObserver,
        detector: TorchStepDetector,
        plan: Plan,
        compile_status: CompileStatus,
        origins: bool,
    ) -> None:
        self.ports: list[Port] = []
        self._observer = observer
        self._detector = detector
        self._plan = plan
        self._compile_status = compile_status
        self.origins = OriginFinder(observer, detector) if origins else None
        self._calls = CallStack()
        self._keys = (
            new_hook_key(),
            new_hook_key(),
            new_hook_key(),
        )  # of forward pre-hooks, forward hooks and origin hooks

    def port(self, path: str, kind: str) -> Port | None:
        """Return the port of a path if any probe wants it, and keep it in `ports`."""
        port = self._plan.of(self._observer.recorder, path, kind)
        if port is not None:
            self.ports.append(port)
        return port

    def hooks_of(self, root: nn.Module) -> Iterable[tuple[nn.Module, list[Register], int, list[str]]]:
        """Yield each module that needs hooks, the functions that register its hooks, its probes and its paths."""
        for module, paths in tappable(root).items():
            ports = {
                kind: found
                for kind in MODULE_PORTS
                if (found := [p for path in paths if (p := self.port(path, kind)) is not None])
            }
            registers = self._registers(ports) if ports else []
            bits = bits_of([port for group in ports.values() for port in group])
            if self.origins is not None:  # it looks at every module, in every step that any probe wants
                hook = OriginHook(self.origins, paths[0], bits_of(ports.get("output", [])))
                registers, bits = [*registers, partial(_register_origin, hook=hook, key=self._keys[2])], -1
            if registers:
                yield module, registers, bits, paths

    def _registers(self, ports: dict[str, list[Port]]) -> list[Register]:
        outputs = ports.get("output", [])
        plain = len(outputs) == 1 and not ports.keys() & {"grad_output", "grad_input"}
        registers: list[Register] = []
        if plain:
            output_hook = OutputHook(self._observer, self._detector, outputs[0], self._compile_status)
            registers = [partial(_register_after, hook=output_hook, key=self._keys[1])]
            if len(ports) == 1:
                return registers
        before = ForwardPreHook(self._observer, self._detector, ports, self._calls, self._compile_status)
        if before.bits:
            registers.insert(0, partial(_register_before, hook=before, key=self._keys[0]))
        if not plain:
            after, always = ForwardHook(self._observer, self._detector, ports, before), bool(before.grad_inputs)
            registers.append(partial(_register_after, hook=after, key=self._keys[1], always_call=always))
        return registers


def tappable(root: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the modules that can have hooks, each with all its paths."""
    names: dict[nn.Module, list[str]] = {}
    for path, module in modules.modules_of(root):
        if not modules.reason_untappable(module):
            names.setdefault(module, []).append(path)
    return names


def enclosing(paths: Iterable[str], layers: Mapping[str, T]) -> T | None:
    """Return what belongs to the encoder layer that a module of these paths is or lies in."""
    for path in paths if layers else ():
        while path and path not in layers:
            path = path.rpartition(".")[0]
        if path in layers:
            return layers[path]
    return None


def _register_before(module: nn.Module, hook: ForwardPreHook, key: int) -> RemovableHandle:
    hook.names = names_of(module.forward)
    return rekey(key, module.register_forward_pre_hook(hook, with_kwargs=True))


def _register_after(module: nn.Module, hook: Any, key: int, always_call: bool = False) -> RemovableHandle:
    return rekey(key, module.register_forward_hook(hook, always_call=always_call))


def _register_origin(module: nn.Module, hook: OriginHook, key: int) -> RemovableHandle:
    return rekey(key, module.register_forward_hook(hook, with_kwargs=True))


def register_on_root(root: nn.Module, before: RootForwardPreHook, after: RootForwardHook) -> list[RemovableHandle]:
    """Register the two hooks that find steps."""
    if any(path == "" for path, _ in modules.encoder_layers(root)):
        # Any hook on the layer itself would disable its fused path: use global hooks, and pick out this module.
        only = weakref.ref(root)
        return [
            register_module_forward_pre_hook(partial(_only, only, before)),
            register_module_forward_hook(partial(_only, only, after), always_call=True),
        ]
    return [
        root.register_forward_pre_hook(before, prepend=True),
        hide_flags(root.register_forward_hook(after, always_call=True)),
    ]


def _only(root: weakref.ref[nn.Module], hook: Callable[..., None], module: nn.Module, *rest: Any) -> None:
    if module is root():
        hook(module, *rest)
