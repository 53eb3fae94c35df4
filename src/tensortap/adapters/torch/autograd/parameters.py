"""Parameters, their gradients and their updates, and buffers, taken when the optimizer steps.

The optimizers' global hooks need no reference to the user's optimizer. What they show is what the optimizer uses:
gradients summed over the micro-batches and unscaled where a GradScaler is in use. With a closure it is the gradient
of its last evaluation. Where nothing steps, it is what `.grad` holds when the step closes.

Gradients that `clip_grad_norm_` clips are taken just before, and their row says so: its number `clip` is the factor
that the optimizer's gradient has over the row. Other clipping cannot be told apart from the gradient itself; a row
without that number is the gradient as used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tensortap.adapters.protocol import Port
from tensortap.adapters.torch.autograd.clipping import CLIPPING
from tensortap.adapters.torch.autograd.gradients import StepSource
from tensortap.adapters.torch.distributed.fully_shard import FullyShardedParameters
from tensortap.adapters.torch.distributed.shards import local_of
from tensortap.adapters.torch.modules.tensors import TensorObserver
from tensortap.adapters.torch.modules.values import values_of
from tensortap.record.recorder import OpenStep
from tensortap.record.table import Value
from tensortap.select.ports import BUFFER_PORTS

FROZEN: Final = "requires no gradient"
NO_GRADIENT: Final = "no gradient reached it"
NO_OPTIMIZER: Final = "no optimizer stepped it"


class Owner(NamedTuple):
    """Where a parameter or buffer hangs. The tensor itself may be replaced."""

    module: weakref.ref[nn.Module]
    name: str
    ports: tuple[str, ...]

    @property
    def types(self) -> tuple[str, ...]:
        """Its class, as patterns such as `type:Parameter:grad` name it."""
        return ("Buffer",) if self.ports == BUFFER_PORTS else ("Parameter",)

    def parameter(self) -> nn.Parameter | None:
        """Return the parameter as it is now, if it is there and has a shape."""
        found = getattr(self.module(), self.name, None)
        return found if isinstance(found, nn.Parameter) and not is_lazy(found) else None

    def buffer(self) -> Tensor | None:
        """Return the buffer as it is now, if it is there and has a shape."""
        module = self.module()
        found = None if module is None else module._buffers.get(self.name)
        return found if found is not None and not is_lazy(found) else None


class Stepping(NamedTuple):
    """What the steps are told about optimizers."""

    starts: Callable[[Any, Any], None]
    stepped: Callable[[Any], None]


class ParameterTaps:
    """Watches the parameters that probes want, and tells when an optimizer that owns one of ours has stepped."""

    def __init__(
        self, observer: TensorObserver, steps: StepSource, owners: dict[str, Owner], ports: dict[str, list[Port]],
        tell: Stepping, sharded: FullyShardedParameters,
    ) -> None:  # fmt: skip
        self._observer = observer
        self._sharded = sharded
        self._steps = steps
        self._owners = owners
        self._ports = ports
        self._tell = tell
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._before: dict[str, Tensor] = {}
        self._taken: set[str] = set()
        self._clipped: dict[str, tuple[int, int]] = {}  # gradients that were taken before clipping, as they then became
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        CLIPPING.listen(self, False)
        self._before.clear()

    def arm(self, armed: int) -> None:
        """A step has opened: clipping is of interest while a probe may want its gradients."""
        if self._ports.get("grad"):
            CLIPPING.listen(self, any(armed & port.bits for port in self._ports["grad"]))

    def before_clipping(self, parameters: list[Any], most: float, norm: Any) -> None:
        """Gradients as they are before `clip_grad_norm_` scales them, and by how much it will."""
        try:
            step, ids = self._steps.current(), {id(parameter) for parameter in parameters}
            taken = self._take("grad", step, ids, skip=self._clipped)
            factor = clip_factor(most, norm)
            for port, row in taken:
                self._observer.devices.number(step, row, "clip", factor, port.bits)
                self._clipped[f"{port.path}:grad"] = (0, 0)
        except Exception as error:
            self._failed(error)

    def after_clipping(self, parameters: list[Any]) -> None:
        """Remember what they became, to know them again when the optimizer steps."""
        try:
            for name in self._clipped:
                self._clipped[name] = self._mark(name)
        except Exception as error:
            self._failed(error)

    def take_rest(self, step: OpenStep) -> None:
        """The step ends: parameters and gradients that no optimizer has shown, as they are now."""
        self._take("param", step, skip=self._taken)
        self._take("grad", step, skip=self._taken)
        self._take_buffers(step)
        self._taken.clear()
        self._clipped.clear()

    def any_gradient(self) -> bool:
        """Whether there are gradients that a further backward would add to."""
        parameters = (owner.parameter() for owner in self._owners.values())
        return any(p.grad is not None for p in parameters if p is not None) or self._sharded.pending()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if self._owns(optimizer):
                closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
                self._tell.starts(optimizer, closure)
                self._observe(optimizer, self._steps.current(), gradients=closure is None)
        except Exception as error:
            self._failed(error)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if self._owns(optimizer):
                step = self._steps.current()
                if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
                    self._take("grad", step, _ids(optimizer), skip=self._as_clipped())
                self._forget_clipped(_ids(optimizer))
                if self._before:
                    self._take_updates(step)
                self._tell.stepped(optimizer)
        except Exception as error:
            self._failed(error)

    def _owns(self, optimizer: Any) -> bool:
        known = self._known.get(optimizer)
        if known is None:
            ids = _ids(optimizer)
            known = any(id(owner.parameter()) in ids for owner in self._owners.values())
            self._known[optimizer] = known
        return known

    def _observe(self, optimizer: Any, step: OpenStep, gradients: bool) -> None:
        if not any(step.armed & port.bits for group in self._ports.values() for port in group):
            return
        ids = _ids(optimizer)
        self._take("param", step, ids)
        self._take_buffers(step)
        if gradients:
            self._take("grad", step, ids, getattr(optimizer, "grad_scale", None), self._as_clipped())
        for port, parameter in self._plan("update", step, ids):
            self._before[port.path] = parameter.detach().clone()

    def _take(
        self,
        kind: str,
        step: OpenStep,
        ids: set[int] | None = None,
        scale: Tensor | None = None,
        skip: Iterable[str] = (),
    ) -> list[tuple[Port, int]]:
        """Record what armed ports want; the ports, with their rows."""
        rows = []
        for port, parameter in self._plan(kind, step, ids):
            tensor = parameter.grad if kind == "grad" else parameter
            name = f"{port.path}:{kind}"
            if tensor is None:
                port.note = NO_GRADIENT if parameter.requires_grad else FROZEN
            elif name not in skip:
                # Fused optimizers divide by the scale themselves, inside the step.
                tensor = tensor if scale is None else tensor.detach() / scale
                rows.append((port, self._observer.take(port.point(""), tensor, step)))
                if ids is not None:
                    self._taken.add(name)
        return [(port, row) for port, row in rows if row >= 0]

    def _take_buffers(self, step: OpenStep) -> None:
        """Record the buffers once a step: no optimizer owns them, so the first that steps shows them all."""
        for port in self._ports.get("buffer", ()):
            buffer = self._owners[port.path].buffer() if step.armed & port.bits else None
            name = f"{port.path}:buffer"
            if buffer is not None and name not in self._taken:
                self._observer.take(port.point(""), buffer, step)
                self._taken.add(name)

    def _as_clipped(self) -> set[str]:
        """The gradients that are still what clipping made of them: their rows are there already."""
        return {name for name, mark in self._clipped.items() if self._mark(name) == mark}

    def _forget_clipped(self, ids: set[int]) -> None:
        """An optimizer has used these gradients: what is clipped from now on is another step of it."""
        parameters = {name: self._owners[name.removesuffix(":grad")].parameter() for name in self._clipped}
        self._clipped = {name: mark for name, mark in self._clipped.items() if id(parameters[name]) not in ids}

    def _mark(self, name: str) -> tuple[int, int]:
        parameter = self._owners[name.removesuffix(":grad")].parameter()
        gradient = None if parameter is None else parameter.grad
        return (0, -1) if gradient is None else (id(gradient), gradient._version)

    def _take_updates(self, step: OpenStep) -> None:
        """The change of each parameter, with its size relative to the parameter as `ratio`."""
        before, self._before = self._before, {}
        for port, parameter in self._plan("update", step, None):
            old = before.pop(port.path, None)
            if old is None:
                continue
            change = parameter.detach() - old
            row = self._observer.take(port.point(""), change, step)
            if row >= 0 and self._observer.devices.wants(old):
                self._observer.devices.number(step, row, "ratio", ratio(change, old), port.bits)
            elif row >= 0:
                size, norm = float(step.table.columns["l2"][row]), float(torch.linalg.vector_norm(local_of(old)))
                step.table.values.append(Value(row, "ratio", size / norm if norm else float("inf"), port.bits))

    def _plan(self, kind: str, step: OpenStep, ids: set[int] | None) -> Iterable[tuple[Port, nn.Parameter]]:
        """The armed ports of a kind with their parameters; with `ids` only those among them."""
        for port in self._ports.get(kind, ()):
            if step.armed & port.bits:
                parameter = self._owners[port.path].parameter()
                if parameter is not None and (ids is None or id(parameter) in ids):
                    yield port, parameter if ids is not None else self._sharded.shard(parameter)

    def _failed(self, error: Exception) -> None:
        self._observer.recorder.counters.failed("skipped_tensors", "observing an optimizer's step", error)


def ratio(change: Tensor, old: Tensor) -> Tensor:
    """‖change‖ / ‖old‖ of this process's part, on its device; halves would overflow and are widened."""
    parts = [part for part in (values_of(change), values_of(old)) if part is not None]
    wide = [part.float() if part.element_size() < 4 else part for part in parts]
    size, norm = (torch.linalg.vector_norm(part) for part in wide)
    return torch.where(norm > 0, size / norm, float("inf"))


def clip_factor(most: float, norm: Any) -> Tensor:
    """What `clip_grad_norm_` multiplies gradients by; NaN where to know it would need other processes."""
    if hasattr(norm, "to_local"):
        return torch.tensor(float("nan"))
    return torch.clamp(most / (torch.as_tensor(norm).detach() + 1e-6), max=1.0)


def _ids(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
