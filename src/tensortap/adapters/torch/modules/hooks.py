"""The hooks that sit on modules. They return nothing, keep no tensor, and never raise into the model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tensortap.adapters.protocol import Port, bits_of
from tensortap.adapters.torch.autograd.gradients import (
    InputEdges,
    Steps,
    await_inputs,
    await_outputs,
    backward_task,
    count_call,
)
from tensortap.adapters.torch.compile import backward as compiled_backward
from tensortap.adapters.torch.compile import code as compiled_code
from tensortap.adapters.torch.compile import operators as compiled
from tensortap.adapters.torch.compile.operators import Regions, is_exporting
from tensortap.adapters.torch.compile.sites import GradientSite, Site
from tensortap.adapters.torch.modules.nested import inputs_by, inputs_in, tensors_in
from tensortap.adapters.torch.modules.tensors import TensorObserver, aside
from tensortap.record.recorder import OpenStep, Point

tracing: Final = torch._C._get_tracing_state  # torch.jit.trace would record what we ask of a tensor
_NOTHING: Final[Mapping[str, Any]] = {}
NO_TENSOR_OUT: Final = "returned no tensor"
NO_TENSOR_IN: Final = "was given no tensor"


class Hook:
    """Copies and pickles of a watched model must work, and carry no tap away.

    The compiler follows a hook as part of the module's call, and then it is to find operations of ours. A hook
    that it runs outside the graph (those of a compiled module itself) is none of its business.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Have the compiler pass by every hook that runs by itself."""
        if "__call__" in vars(cls):
            compiled_code.pass_by(vars(cls)["__call__"])

    def __reduce__(self) -> str | tuple[Any, ...]:
        # A callable of the standard library that does nothing: the pickle opens where tensortap is not installed.
        return (getattr, (contextlib.nullcontext(), "__exit__"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Leftover:
        return Leftover()


class Leftover(Hook):
    """What a copied model has in place of a tap. The first call sweeps them all off, before anything else runs."""

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        """Before or after the copy's forward."""
        for part in module.modules():
            notes: list[dict[int, Any]] = [
                part._forward_pre_hooks_with_kwargs, part._forward_hooks_with_kwargs, part._forward_hooks_always_called
            ]  # fmt: skip
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                for key in [key for key, hook in hooks.items() if isinstance(hook, Leftover)]:
                    for entries in (hooks, *notes):
                        entries.pop(key, None)


class OutputHook(Hook):
    """Sees what a module returns: the hook that most modules carry, kept lean."""

    __slots__ = ("bits", "observer", "plain", "port", "site", "steps", "target")

    def __init__(self, observer: TensorObserver, steps: Steps, port: Port, regions: Regions) -> None:
        self.observer = observer
        self.steps = steps
        self.port = port
        self.bits = port.bits
        self.plain: Point | None = None
        self.target = Site(observer, steps, [port], regions)
        self.site = self.target.site

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the module's forward."""
        if is_compiling():
            _see_compiled(self.site, list(tensors_in(output)), NO_TENSOR_OUT)
            return
        if tracing():
            return
        steps, observer = self.steps, self.observer
        step = steps.current() if steps.spread else observer.recorder.current
        if not step.armed & self.bits:
            return
        if type(output) is Tensor:
            observer.take(self.plain or self._plain(), output, step, backward_task() != -1)
            return
        try:
            _take_all(observer, [self.port], list(tensors_in(output)), step, backward_task() != -1)
        except Exception as error:
            _failed(observer, f"looking into a {type(output).__name__}", error)

    def _plain(self) -> Point:
        self.plain = self.port.point("")
        return self.plain


class BeforeHook(Hook):
    """Sees what a module is given, before an in-place forward can change it."""

    __slots__ = ("bits", "edges", "grad_inputs", "grad_site", "inputs", "names", "observer", "site", "steps", "targets")

    def __init__(
        self,
        observer: TensorObserver,
        steps: Steps,
        ports: Mapping[str, list[Port]],
        edges: InputEdges,
        regions: Regions,
    ) -> None:
        self.observer = observer
        self.steps = steps
        self.edges = edges
        self.inputs = ports.get("input", [])
        self.grad_inputs = ports.get("grad_input", [])
        self.bits = bits_of([*self.inputs, *self.grad_inputs])
        self.names: tuple[str, ...] = ()  # of what forward takes: the compiler could not ask for them
        self.targets = (
            Site(observer, steps, self.inputs, regions),
            GradientSite(observer, steps, self.grad_inputs, regions),
        )
        self.site, self.grad_site = (target.site if target.ports else None for target in self.targets)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NOTHING) -> None:
        """Before the module's forward. One taken off while the call begins is called once more, without kwargs."""
        if is_compiling():
            self._compiled(args, kwargs)
            return
        if tracing():
            return
        step = self.steps.current()
        if not step.armed & self.bits:
            return
        try:
            given = inputs_in(module.forward, args, kwargs)
            recomputed = backward_task() != -1
            for port in self.inputs:
                if not given:
                    port.note = NO_TENSOR_IN
                for slot, tensor in given:
                    self.observer.take(port.point(slot), tensor, step, recomputed)
            if self.grad_inputs:
                with aside():
                    self.edges.note(self, given)
        except Exception as error:
            _failed(self.observer, f"observing the input of a {type(module).__name__}", error)

    def _compiled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = inputs_by(self.names, args, kwargs)
        _see_compiled(self.site, given, NO_TENSOR_IN)
        if self.grad_site is not None and not is_exporting():
            compiled_backward.enter(self.grad_site, given)


class AfterHook(Hook):
    """Sees what one module returns, under every name it has, and arranges for gradients."""

    __slots__ = (
        "before",
        "bits",
        "grad_in_site",
        "grad_outputs",
        "grad_site",
        "observer",
        "outputs",
        "site",
        "steps",
        "targets"
    )  # fmt: skip

    def __init__(
        self, observer: TensorObserver, steps: Steps, ports: Mapping[str, list[Port]], before: BeforeHook
    ) -> None:
        self.observer = observer
        self.steps = steps
        self.before = before if before.grad_inputs else None
        self.outputs = ports.get("output", [])
        self.grad_outputs = ports.get("grad_output", [])
        self.bits = bits_of([port for group in ports.values() for port in group])
        regions = before.targets[0].regions
        self.targets = (
            Site(observer, steps, self.outputs, regions), GradientSite(observer, steps, self.grad_outputs, regions)
        )  # fmt: skip
        self.site, self.grad_site = (target.site if target.ports else None for target in self.targets)
        self.grad_in_site = before.grad_site

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the module's forward; after a failed one too, where something was noted before it."""
        if is_compiling():
            self._compiled(output)
            return
        if tracing():
            return
        noted = self.before and self.before.edges.recall(self.before)
        steps, observer = self.steps, self.observer
        step = steps.current() if steps.spread else observer.recorder.current
        if not step.armed & self.bits:
            return
        try:
            recomputed = backward_task() != -1
            found = [("", output)] if type(output) is Tensor else list(tensors_in(output))
            _take_all(observer, self.outputs, found, step, recomputed)
            if self.grad_outputs or noted:
                call = count_call(step, self, recomputed)
                with aside():
                    await_outputs(observer, steps, self.grad_outputs, found, step, call)
                    if noted and self.before:
                        await_inputs(observer, steps, self.before.grad_inputs, noted, found, step, call)
        except Exception as error:
            _failed(observer, f"observing a {type(module).__name__}", error)

    def _compiled(self, output: Any) -> None:
        found = list(tensors_in(output))
        _see_compiled(self.site, found, NO_TENSOR_OUT)
        if is_exporting():
            return
        if self.grad_site is not None:
            compiled_backward.expect(self.grad_site, found)
        if self.grad_in_site is not None:
            compiled_backward.leave(self.grad_in_site, found)


def _see_compiled(site: Tensor | None, found: list[tuple[str, Tensor]], otherwise: str) -> None:
    """What a hook leaves in the graph. A program that is exported leaves this process, and takes no tap along."""
    if site is None or is_exporting():
        return
    if found:
        compiled.see(site, found)
    else:
        compiled.tell(site, otherwise)


def _take_all(
    observer: TensorObserver, ports: list[Port], found: list[tuple[str, Tensor]], step: OpenStep, recomputed: bool
) -> None:
    for port in ports:
        if not found:
            port.note = NO_TENSOR_OUT
        for slot, tensor in found:
            observer.take(port.points.get(slot) or port.point(slot), tensor, step, recomputed)


def _failed(observer: TensorObserver, what: str, error: Exception) -> None:
    counters = observer.recorder.counters
    if counters.strict:  # it was counted where it happened, or nobody will read the count
        raise error
    counters.failed("skipped_tensors", what, error)
