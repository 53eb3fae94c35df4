"""Which hooks the modules of a model get for what the probes want, and how each is put on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.nested import names_of
from tensortap.adapters.protocol import Plan, Port
from tensortap.adapters.torch.autograd.gradients import InputEdges
from tensortap.adapters.torch.compile.operators import Regions
from tensortap.adapters.torch.modules import tree as modules
from tensortap.adapters.torch.modules.hooks import AfterHook, BeforeHook, OutputHook
from tensortap.adapters.torch.modules.hookset import fresh_key, under
from tensortap.adapters.torch.modules.roots import RootAfter, RootBefore
from tensortap.adapters.torch.modules.tensors import TensorObserver
from tensortap.adapters.torch.nonfinite.hook import OriginHook
from tensortap.adapters.torch.steps import TorchStepDetector
from tensortap.select.ports import MODULE_PORTS

Puts = list[Callable[[nn.Module], RemovableHandle]]


class Placing:
    """Makes the hooks of one tap, and remembers the ports that they are for."""

    def __init__(
        self, observer: TensorObserver, detector: TorchStepDetector, plan: Plan, regions: Regions, origins: bool
    ) -> None:
        self.ports: list[Port] = []
        self._observer = observer
        self._detector = detector
        self._plan = plan
        self._regions = regions
        self._origins = origins
        self._edges = InputEdges()
        self._keys = (fresh_key(), fresh_key(), fresh_key())  # of hooks before, after, and after those

    def port(self, path: str, kind: str) -> Port | None:
        """The port at a place, if any probe wants it; it is remembered."""
        port = self._plan.of(self._observer.recorder, path, kind)
        if port is not None:
            self.ports.append(port)
        return port

    def of(self, root: nn.Module) -> Iterable[tuple[nn.Module, Puts, int, list[str]]]:
        """For each module that a probe wants: how to put its hooks on, for which probes, and all its names."""
        for module, paths in tappable(root).items():
            ports = {
                kind: found
                for kind in MODULE_PORTS
                if (found := [p for path in paths if (p := self.port(path, kind)) is not None])
            }
            if ports:
                bits = 0
                for port in (port for group in ports.values() for port in group):
                    bits |= port.bits
                yield module, [*self._puts(ports), *self._origin_puts(paths[0])], bits, paths

    def _puts(self, ports: dict[str, list[Port]]) -> Puts:
        if list(ports) == ["output"] and len(ports["output"]) == 1:
            hook = OutputHook(self._observer, self._detector, ports["output"][0], self._regions)
            return [partial(_put_after, hook=hook, key=self._keys[1])]
        before = BeforeHook(self._observer, self._detector, ports, self._edges, self._regions)
        after = AfterHook(self._observer, self._detector, ports, before)
        puts: Puts = [partial(_put_before, hook=before, key=self._keys[0])] if before.bits else []
        return [*puts, partial(_put_after, hook=after, key=self._keys[1], always_call=bool(before.grad_inputs))]

    def _origin_puts(self, path: str) -> Puts:
        return [partial(_put_origin, hook=OriginHook(path, self._detector), key=self._keys[2])] if self._origins else []


def tappable(root: nn.Module) -> dict[nn.Module, list[str]]:
    """The modules that can have hooks, each with all its names."""
    names: dict[nn.Module, list[str]] = {}
    for path, module in modules.modules_of(root):
        if not modules.why_not(module):
            names.setdefault(module, []).append(path)
    return names


def within(paths: Iterable[str], layer: str) -> bool:
    """Whether a module of these names is an encoder layer or lies in it."""
    return not layer or any(path == layer or path.startswith(f"{layer}.") for path in paths)


def _put_before(module: nn.Module, hook: BeforeHook, key: int) -> RemovableHandle:
    hook.names = names_of(module.forward)
    return under(key, module.register_forward_pre_hook(hook, with_kwargs=True))


def _put_after(module: nn.Module, hook: Any, key: int, always_call: bool = False) -> RemovableHandle:
    return under(key, module.register_forward_hook(hook, always_call=always_call))


def _put_origin(module: nn.Module, hook: OriginHook, key: int) -> RemovableHandle:
    return under(key, module.register_forward_hook(hook, with_kwargs=True))


def put_on_root(root: nn.Module, before: RootBefore, after: RootAfter) -> list[RemovableHandle]:
    """The two hooks that find steps."""
    if any(path == "" for path, _ in modules.encoder_layers(root)):
        # Any hook on the layer itself would switch its fused path off: see all modules, and pick out this one.
        only = weakref.ref(root)
        return [
            register_module_forward_pre_hook(partial(_only, only, before)),
            register_module_forward_hook(partial(_only, only, after), always_call=True),
        ]
    return [
        root.register_forward_pre_hook(before, prepend=True),
        root.register_forward_hook(after, always_call=True),
    ]


def _only(root: weakref.ref[nn.Module], hook: Callable[..., None], module: nn.Module, *rest: Any) -> None:
    if module is root():
        hook(module, *rest)
