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
from tensortap.adapters.torch.modules.hookset import (
    HookSet,
    Register,
    new_hook_key,
    register_after,
    register_before,
    rekey,
)
from tensortap.adapters.torch.modules.own_outputs import UndecidedModule
from tensortap.adapters.torch.modules.roots import RootForwardHook, RootForwardPreHook
from tensortap.adapters.torch.modules.tensors import TensorObserver
from tensortap.adapters.torch.nonfinite.finder import OriginFinder, OriginHook, RootInputsHook
from tensortap.adapters.torch.steps import TorchStepDetector
from tensortap.select.ports import MODULE_PORTS, PORT_INFO

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
        self.computing: list[str] = []  # paths that a call has shown to compute beyond what they call
        self._observer = observer
        self._detector = detector
        self._plan = plan
        self._compile_status = compile_status
        self.origins = OriginFinder(observer, detector) if origins else None
        self._calls = CallStack()
        self._keys = tuple(new_hook_key() for _ in range(4))  # forward pre-hooks, forward hooks, origins, own outputs

    def port(self, path: str, kind: str) -> Port | None:
        """Return the port of a path if any probe wants it, and keep it in `ports`."""
        port = self._plan.of(self._observer.recorder, path, kind)
        if port is not None:
            self.ports.append(port)
        return port

    def hooks_of(
        self, names: Mapping[nn.Module, list[str]]
    ) -> Iterable[tuple[nn.Module, list[Register], int, list[str]]]:
        """Yield each module that needs hooks, the functions that register its hooks, its probes and its paths."""
        kinds = self._plan.kinds(MODULE_PORTS)
        for module, paths in names.items():
            ports = self._ports_of(paths, kinds)
            registers = self._registers(ports) if ports else []
            bits = bits_of([port for group in ports.values() for port in group]) if ports else 0
            if self.origins is not None:  # it looks at every module, in every step that any probe wants
                hook = OriginHook(self.origins, paths[0], bits_of(ports.get("output", [])))
                registers, bits = [*registers, partial(_register_origin, hook=hook, key=self._keys[2])], -1
                if "" in paths:
                    inputs = RootInputsHook(self.origins)
                    registers.append(partial(register_before, hook=inputs, key=self._keys[2]))
            if registers:
                yield module, registers, bits, paths

    def _ports_of(self, paths: list[str], kinds: Iterable[str]) -> dict[str, list[Port]]:
        """Return the ports of a module that probes want, under all its names."""
        ports: dict[str, list[Port]] = {}
        for kind in kinds:
            for path in paths:
                if (port := self.port(path, kind)) is not None:
                    ports.setdefault(kind, []).append(port)
        return ports

    def follow(self, other: HookPlacement, tree: modules.ModuleTree) -> None:
        """Take over from the placement of an earlier plan which modules compute: they are watched by default."""
        self.computing = other.computing
        named, types = dict(tree.named), modules.TypeNames()
        for path in (path for path in self.computing if path in named):
            site = modules.candidate(path, named[path], types, default=True)
            port = self._plan.port_for_named_value(self._observer.recorder, site, "output")
            if port is not None:
                self._plan.ports[path, "output"] = list(port.patterns)

    def undecided(
        self, names: Mapping[nn.Module, list[str]], hooks_for: Callable[[list[str]], HookSet]
    ) -> list[UndecidedModule]:
        """Return the modules that are watched by default if they turn out to compute beyond what they call."""
        defaults, types = modules.DefaultModules(), modules.TypeNames()
        found = []
        for module, paths in names.items():
            if defaults.is_undecided(paths[0], module) and (ports := self._default_ports(module, paths, types)):
                below = [inner for _, inner in modules.modules_of(module)]
                inside = [names[inner][0] for inner in below if inner in names and inner is not module]
                layers = [inner for inner in below if isinstance(inner, nn.TransformerEncoderLayer)]
                watch = partial(self._watch_output, ports, paths, hooks_for(paths))
                found.append(UndecidedModule(paths[0], inside, layers, bits_of(ports), watch))
        return found

    def _default_ports(self, module: nn.Module, paths: list[str], types: modules.TypeNames) -> list[Port]:
        """Return the ports of an output that no probe wants yet, but would if the output were watched by default."""
        if any((path, "output") in self._plan.ports for path in paths):
            return []
        recorder = self._observer.recorder
        sites = [modules.candidate(path, module, types, default=True) for path in paths]
        ports = [self._plan.port_for_named_value(recorder, site, "output") for site in sites]
        return [port for port in ports if port is not None]

    def _watch_output(
        self, ports: list[Port], paths: list[str], hooks: HookSet, module: nn.Module, args: Any, output: Any
    ) -> None:
        """Record an output, and from now on that of every call."""
        self.ports += ports
        self.computing += paths
        _, after = self._hooks({"output": ports})
        hooks.add(module, [partial(register_after, hook=after, key=self._keys[3])], bits_of(ports), paths)
        after(module, args, output)

    def _registers(self, ports: dict[str, list[Port]]) -> list[Register]:
        before, after = self._hooks(ports)
        calls_always = before is not None and bool(before.grad_inputs)
        register = partial(register_after, hook=after, key=self._keys[1], always_call=calls_always)
        if before is None or not before.bits:
            return [register]
        return [partial(_register_inputs, hook=before, key=self._keys[0]), register]

    def _hooks(self, ports: dict[str, list[Port]]) -> tuple[ForwardPreHook | None, OutputHook | ForwardHook]:
        outputs = ports.get("output", [])
        plain = len(outputs) == 1 and (len(ports) == 1 or not any(PORT_INFO[kind].gradient for kind in ports))
        output_hook = OutputHook(self._observer, self._detector, outputs[0], self._compile_status) if plain else None
        if output_hook is not None and len(ports) == 1:
            return None, output_hook
        before = ForwardPreHook(self._observer, self._detector, ports, self._calls, self._compile_status)
        return before, output_hook or ForwardHook(self._observer, self._detector, ports, before)


def tappable(named: modules.NamedModules) -> dict[nn.Module, list[str]]:
    """Return the modules that can have hooks, each with all its paths."""
    names: dict[nn.Module, list[str]] = {}
    for path, module in named:
        if not modules.reason_untappable(module):
            names.setdefault(module, []).append(path)
    return names


def enclosing(paths: Iterable[str], layers: Mapping[str, T]) -> T | None:
    """Return the entry of the encoder layer that contains a module with these paths, or is that module."""
    for path in paths if layers else ():
        while path and path not in layers:
            path = path.rpartition(".")[0]
        if path in layers:
            return layers[path]
    return None


def _register_inputs(module: nn.Module, hook: ForwardPreHook, key: int) -> RemovableHandle:
    hook.names = names_of(module.forward)
    return register_before(module, hook, key)


def _register_origin(module: nn.Module, hook: OriginHook, key: int) -> RemovableHandle:
    return rekey(key, module.register_forward_hook(hook, with_kwargs=True))


def register_before_root(root: nn.Module, hook: RootForwardPreHook) -> RemovableHandle:
    """Register the hook that begins steps, before all other pre-hooks of the root."""
    if _is_encoder_layer(root):
        return register_module_forward_pre_hook(partial(_only, weakref.ref(root), hook))
    return root.register_forward_pre_hook(hook, prepend=True)


def register_after_root(root: nn.Module, hook: RootForwardHook) -> RemovableHandle:
    """Register the hook that ends steps. Call it last: what the root returns belongs to the step that it ends."""
    if _is_encoder_layer(root):
        return register_module_forward_hook(partial(_only, weakref.ref(root), hook), always_call=True)
    return hide_flags(root.register_forward_hook(hook, always_call=True))


def _is_encoder_layer(root: nn.Module) -> bool:
    """Return whether any hook on the root would disable its fused path: a global hook picks it out then."""
    return modules.is_encoder_layer(modules.unwrapped(root))


def _only(root: weakref.ref[nn.Module], hook: Callable[..., None], module: nn.Module, *rest: Any) -> None:
    if module is root():
        hook(module, *rest)
