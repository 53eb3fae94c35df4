"""Taps on a PyTorch module: put on, kept out of the way of fused paths, and taken off without a trace."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.base import Clock, Port, Wanted
from tensortap.adapters.torch import modules
from tensortap.adapters.torch.hooks import ForwardHook, await_gradient
from tensortap.adapters.torch.params import ParameterTaps
from tensortap.adapters.torch.steps import RootAfter, RootBefore, StepFinder
from tensortap.adapters.torch.tensors import Taker
from tensortap.recorder import OpenStep, Recorder
from tensortap.sites import Candidate

FUSED = "ran fused inside nn.TransformerEncoderLayer; watch(..., fast_path='leave') shows it, with other rounding"
NEVER = "never ran"
COMPILED = "lies in a compiled region"


def adapt(model: Any, **options: Any) -> TorchAdapter | None:
    """The adapter for a module, or nothing for other objects that PyTorch defines."""
    return TorchAdapter(model, **options) if isinstance(model, nn.Module) else None


class TorchAdapter:
    """Taps on one module tree. It holds no reference that would keep the model alive."""

    def __init__(self, root: nn.Module, *, fast_path: str = "keep") -> None:
        self.fast_path = fast_path
        self._root = weakref.ref(root)
        self._ports: list[Port] = []
        self._handles: list[RemovableHandle] = []
        self._fused: list[_FusedLayer] = []
        self._named: dict[str, Port | None] = {}

    def candidates(self) -> list[Candidate]:
        """Every module and parameter that can be tapped."""
        return modules.candidates_of(self._model())

    def untappable(self) -> dict[str, str]:
        """What TorchScript owns."""
        return modules.untappable(self._model())

    def describe(self) -> dict[str, Any]:
        """The module tree."""
        root = self._model()
        return {"framework": "torch", "class": type(root).__name__, "modules": modules.tree_of(root)}

    def attach(self, recorder: Recorder, wanted: Wanted, clock: Clock, taker: Taker | None = None) -> None:
        """Put hooks on what the probes want, and two on the root to find steps."""
        root = self._model()
        self._recorder, self._wanted = recorder, wanted
        self._taker = taker or Taker(recorder)
        self._finder = StepFinder(recorder, clock)
        fused = {path: _FusedLayer(layer) for path, layer in modules.encoder_layers(root)} if self._keeps() else {}
        self._handles = [
            root.register_forward_pre_hook(RootBefore(self._finder, self._prepare), prepend=True),
            root.register_forward_hook(RootAfter(self._finder), always_call=True),
        ]
        for module, hook, paths in self._hooks(root):
            inside = next((layer for path, layer in fused.items() if _within(paths, path)), None)
            if inside is None:
                self._handles.append(_put(module, hook))
            else:
                inside.hooks.append((weakref.ref(module), hook))
        self._fused = [layer for layer in fused.values() if layer.hooks]
        self._parameters = self._attach_parameters(root)

    def detach(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        for layer in self._fused:
            layer.take_off()
        self._parameters.remove()
        self._handles, self._fused = [], []

    def current(self) -> OpenStep:
        """The calling thread's step."""
        return self._finder.current()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        return self._finder.enter(step)

    def closing(self, step: OpenStep) -> None:
        """Take parameters and gradients that no optimizer step has shown."""
        if step.armed and step is self._recorder.current:
            self._parameters.take_unstepped(step)
        self._finder.closed()

    def named(self, name: str, value: Any) -> None:
        """The gradient of a value the user named."""
        if name not in self._named:
            self._named[name] = self._wanted.of(self._recorder, name, "grad_output")
        port = self._named[name]
        if port is not None and isinstance(value, Tensor) and self.current().armed & port.bits:
            await_gradient(self._taker, self.current, port.point(""), value)

    def unseen(self) -> dict[str, str]:
        """Modules and ports that were wanted but never seen."""
        silent = [port for port in self._ports if not port.points]
        fused = {path for layer in self._fused if layer.was_fused for path in layer.paths}
        return {f"{port.path}:{port.port}": FUSED if port.path in fused else NEVER for port in silent}

    def _model(self) -> nn.Module:
        root = self._root()
        if root is None:
            raise ReferenceError("the watched model is gone")
        return root

    def _keeps(self) -> bool:
        return self.fast_path == "keep" and not isinstance(self._model(), nn.TransformerEncoderLayer)

    def _hooks(self, root: nn.Module) -> Iterable[tuple[nn.Module, ForwardHook, list[str]]]:
        """One hook for each module that a probe wants, with all the module's names."""
        names: dict[nn.Module, list[str]] = {}
        for path, module in modules.modules_of(root):
            if not modules.is_scripted(module):
                names.setdefault(module, []).append(path)
        for module, paths in names.items():
            ports = {
                kind: found
                for kind in modules.MODULE_PORTS
                if (found := [p for path in paths if (p := self._port(path, kind)) is not None])
            }
            if ports:
                yield module, ForwardHook(self._taker, self._finder.current, ports), paths

    def _attach_parameters(self, root: nn.Module) -> ParameterTaps:
        parameters = modules.parameters_of(root)
        ports = {
            kind: [port for name in parameters if (port := self._port(name, kind)) is not None]
            for kind in modules.PARAMETER_PORTS
        }
        return ParameterTaps(self._taker, self._finder.current, parameters, ports, self._finder.optimizer_stepped)

    def _port(self, path: str, kind: str) -> Port | None:
        port = self._wanted.of(self._recorder, path, kind)
        if port is not None:
            self._ports.append(port)
        return port

    def _prepare(self) -> None:
        """Before each call of the root: fused layers that will run fused must not carry hooks."""
        for layer in self._fused:
            layer.adjust()


class _FusedLayer:
    """A TransformerEncoderLayer: hooks go on while it runs in the open, and off while it may run fused."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        self._layer = weakref.ref(layer)
        self.hooks: list[tuple[weakref.ref[nn.Module], ForwardHook]] = []
        self.was_fused = False
        self._handles: list[RemovableHandle] = []

    @property
    def paths(self) -> set[str]:
        """The names of what lies inside."""
        return {port.path for _, hook in self.hooks for port in hook.ports()}

    def adjust(self) -> None:
        """Put the hooks on, or take them off, as the layer's next call needs."""
        layer = self._layer()
        if layer is None:
            return
        if self._may_fuse(layer):
            self.was_fused = True
            self.take_off()
        elif not self._handles:
            self._handles = [_put(module, hook) for ref, hook in self.hooks if (module := ref()) is not None]

    def take_off(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @staticmethod
    def _may_fuse(layer: nn.TransformerEncoderLayer) -> bool:
        if layer.training:
            return False
        return not (torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()))


def _within(paths: Iterable[str], layer: str) -> bool:
    return any(path == layer or path.startswith(f"{layer}.") for path in paths)


def _put(module: nn.Module, hook: ForwardHook) -> RemovableHandle:
    return module.register_forward_hook(hook, with_kwargs=True)
