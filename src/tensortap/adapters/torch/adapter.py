"""Taps on a PyTorch module: put on, kept out of the way of fused paths, and taken off without a trace."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.base import Clock, Port, Wanted
from tensortap.adapters.torch import modules
from tensortap.adapters.torch.hooks import ForwardHook, await_gradient
from tensortap.adapters.torch.hookset import FusedSet, HookSet
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
        self._sets: list[HookSet] = []
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
        self._handles = [
            root.register_forward_pre_hook(RootBefore(self._finder, self.arm), prepend=True),
            root.register_forward_hook(RootAfter(self._finder), always_call=True),
        ]
        fused = {path: FusedSet(layer) for path, layer in modules.encoder_layers(root)} if self._keeps() else {}
        plain = HookSet()
        for module, hook, paths in self._hooks(root):
            next((layer for path, layer in fused.items() if _within(paths, path)), plain).add(module, hook)
        self._sets = [plain, *fused.values()]
        self._parameters = self._attach_parameters(root)
        self.arm()

    def arm(self) -> None:
        """Hooks are on only while a probe may want the open step; once threads have steps of their own, always."""
        armed = -1 if self._finder.spread else self._recorder.current.armed
        for hooks in self._sets:
            hooks.adjust(armed)

    def detach(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        for hooks in self._sets:
            hooks.take_off()
        self._parameters.remove()
        self._handles, self._sets = [], []

    def current(self) -> OpenStep:
        """The calling thread's step."""
        return self._finder.current()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        before = self._finder.enter(step)
        self.arm()
        return before

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
        fused = {
            path for hooks in self._sets if isinstance(hooks, FusedSet) and hooks.was_fused for path in hooks.paths
        }
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


def _within(paths: Iterable[str], layer: str) -> bool:
    return any(path == layer or path.startswith(f"{layer}.") for path in paths)
