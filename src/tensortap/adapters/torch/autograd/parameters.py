"""Parameters, their gradients and their updates, recorded when the optimizer steps; buffers, when the step closes.

The optimizers' global hooks need no reference to the user's optimizer. What they show is what the optimizer uses:
gradients summed over the micro-batches and unscaled where a GradScaler is in use. With a closure it is the gradient
of its last evaluation. Where nothing steps, it is what `.grad` holds when the step closes.

Gradients that `clip_grad_norm_` clips are recorded just before, and their row says so: its number `clip` is the factor
by which the gradient is then multiplied. Other clipping cannot be told apart from the gradient itself; a row without
that number is the gradient as used.

Buffers change in the forward pass (running statistics) or after the optimizer's step (the bias that balances experts):
when the step closes they hold the values for the next step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor, nn

from tensortap.adapters.torch.autograd.clipping import CLIPPING
from tensortap.adapters.torch.autograd.gradients import StepSource
from tensortap.adapters.torch.autograd.members import MemberPort, MemberPorts
from tensortap.adapters.torch.autograd.updates import UpdateRecorder
from tensortap.adapters.torch.modules.tensors import TensorObserver
from tensortap.record.recorder import OpenStep

FROZEN: Final = "requires no gradient"
NO_GRADIENT: Final = "no gradient reached it"
NO_OPTIMIZER: Final = "no optimizer stepped it"


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient; Megatron keeps it in single precision as `main_grad`, and `.grad` is None then."""
    gradient = parameter.grad
    return getattr(parameter, "main_grad", None) if gradient is None else gradient


class ParameterTaps:
    """Record the parameters that probes want, with their gradients and updates, and buffers."""

    def __init__(self, observer: TensorObserver, steps: StepSource, members: MemberPorts) -> None:
        self._observer = observer
        self._steps = steps
        self.members = members
        self._updates = UpdateRecorder(observer)
        self._recorded: set[str] = set()  # sites
        self._clipped: dict[str, tuple[int, int]] = {}  # gradients recorded before clipping, as they became

    def remove(self) -> None:
        """Stop listening to clipping."""
        CLIPPING.listen(self, False)
        self._updates.clear()

    def arm(self, armed: int) -> None:
        """Begin a step: clipping is of interest while a probe may want its gradients."""
        self.members.refresh()
        CLIPPING.listen(self, self.members.are_wanted("grad", armed))

    def before_clipping(self, parameters: list[Any], most: float, norm: Any) -> None:
        """Record gradients before `clip_grad_norm_` scales them, and by how much it will."""
        try:
            step, ids = self._steps.current(), {id(parameter) for parameter in parameters}
            recorded = self._record("grad", step, ids, skip=self._clipped)
            factor = clip_factor(most, norm)
            for member, row in recorded:
                self._observer.devices.number(step, row, "clip", factor, member.port.bits)
                self._clipped[member.site] = (0, 0)
        except Exception as error:
            self._failed(error)

    def after_clipping(self, parameters: list[Any]) -> None:
        """Remember what the gradients became, to recognise them when the optimizer steps."""
        try:
            for site in self._clipped:
                self._clipped[site] = self._gradient_version(site)
        except Exception as error:
            self._failed(error)

    def record_rest(self, step: OpenStep) -> None:
        """End a step: record parameters, gradients and buffers that no optimizer has shown, as they are now."""
        if step.armed & self.members.bits:
            self._record("param", step, skip=self._recorded)
            if not step.old_gradients:
                self._record("grad", step, skip=self._recorded)
            self._record_buffers(step)
        self._recorded.clear()
        self._clipped.clear()

    def owns(self, optimizer: Any) -> bool:
        """Return whether an optimizer holds any of the model's parameters."""
        return self.members.any_of(ids_of(optimizer))

    def before_step(self, optimizer: Any, closure: Any) -> None:
        """Record the gradients that an optimizer is about to use; with a closure the optimizer computes them itself."""
        self._observe(optimizer, self._steps.current(), gradients=closure is None)

    def after_step(self, optimizer: Any, closure: Any) -> None:
        """Record the gradients and parameters after an optimizer's step."""
        step = self._steps.current()
        if closure is not None:
            self._record("grad", step, ids_of(optimizer), skip=self._unchanged_since_clipping())
        if self._clipped:
            self._forget_clipped(ids_of(optimizer))
        self._updates.record(step)

    def _observe(self, optimizer: Any, step: OpenStep, gradients: bool) -> None:
        if not step.armed & self.members.bits:
            return
        ids = ids_of(optimizer)
        self._record("param", step, ids)
        if gradients:
            scale = getattr(optimizer, "grad_scale", None)
            self._record("grad", step, ids, scale, self._unchanged_since_clipping())
        self._updates.copy(self.members.parameters("update", step.armed, ids))

    def _record(
        self,
        kind: str,
        step: OpenStep,
        ids: set[int] | None = None,
        scale: Tensor | None = None,
        skip: Collection[str] = (),
    ) -> list[tuple[MemberPort, int]]:
        """Record the armed ports of a kind; return those recorded, with their rows."""
        found: list[tuple[MemberPort, Tensor]] = []
        for member, parameter in self.members.parameters(kind, step.armed, ids):
            tensor = gradient_of(parameter) if kind == "grad" else parameter
            if tensor is None:
                member.port.note = NO_GRADIENT if parameter.requires_grad else FROZEN
            elif member.site not in skip:
                # Fused optimizers divide by the scale themselves, inside the step.
                found.append((member, tensor if scale is None else tensor.detach() / scale))
        self._recorded.update(member.site for member, _ in found)
        rows = self._observer.take_all([(m.port.point(""), tensor) for m, tensor in found], step)
        return [(member, row) for (member, _), row in zip(found, rows, strict=True) if row >= 0]

    def _record_buffers(self, step: OpenStep) -> None:
        found = [(member.port.point(""), buffer) for member, buffer in self.members.buffers(step.armed)]
        self._observer.take_all(found, step)

    def _unchanged_since_clipping(self) -> set[str]:
        """Return the gradients that are still what clipping made of them: their rows are there already."""
        return {site for site, version in self._clipped.items() if self._gradient_version(site) == version}

    def _forget_clipped(self, ids: set[int]) -> None:
        """Forget gradients that an optimizer has used: what is clipped from now on is another step of it."""
        parameters = {site: self.members.parameter_at(site.removesuffix(":grad")) for site in self._clipped}
        self._clipped = {site: version for site, version in self._clipped.items() if id(parameters[site]) not in ids}

    def _gradient_version(self, site: str) -> tuple[int, int]:
        parameter = self.members.parameter_at(site.removesuffix(":grad"))
        gradient = None if parameter is None else parameter.grad
        return (0, -1) if gradient is None else (id(gradient), gradient._version)

    def _failed(self, error: Exception) -> None:
        self._observer.recorder.counters.failed("skipped_tensors", "observing an optimizer's step", error)


def clip_factor(most: float, norm: Any) -> Tensor:
    """Return what `clip_grad_norm_` multiplies gradients by; NaN where that would need other processes."""
    if hasattr(norm, "to_local"):
        return torch.tensor(float("nan"))
    return torch.clamp(most / (torch.as_tensor(norm).detach() + 1e-6), max=1.0)


def ids_of(optimizer: Any) -> set[int]:
    """Return the identities of the parameters that an optimizer holds."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
