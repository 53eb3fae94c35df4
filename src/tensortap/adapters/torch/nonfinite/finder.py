"""Find the origin of a non-finite value while a model is watched, at the moment it appears.

A hook on every module looks at its output, whatever the probes want: by the rows that were recorded, or by a sum where
nothing was. The first module that made something non-finite out of finite inputs is run again on a copy, once for each
module, to find the operation. On a device the sums are read when the step closes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tensortap.adapters.results import Origin, TensorSummary
from tensortap.adapters.torch.autograd.gradients import backward_task
from tensortap.adapters.torch.distributed.shards import local_of, may_communicate
from tensortap.adapters.torch.modules.hooks import Hook, is_tracing
from tensortap.adapters.torch.modules.nested import inputs_in, tensors_in
from tensortap.adapters.torch.modules.tensors import TensorObserver, without_torch_function
from tensortap.adapters.torch.nonfinite.origin import (
    is_born_in,
    is_finite,
    is_sound,
    nonfinite_parameter,
    summary_of_values,
)
from tensortap.adapters.torch.nonfinite.rerun import run_again
from tensortap.adapters.torch.steps import TorchStepDetector
from tensortap.record.recorder import OpenStep


class OriginFinder:
    """Set a step's `origin` when one of its modules makes a NaN or an infinity. There is one for each tap."""

    def __init__(self, observer: TensorObserver, steps: TorchStepDetector) -> None:
        self.steps = steps
        self._counters = observer.recorder.counters
        self._devices = observer.devices
        self._explained: dict[str, Origin | None] = {}  # by module; None: it only masks with −inf
        self._pending: dict[OpenStep, list[tuple[Origin, Tensor]]] = {}  # sums on a device, by the module of each
        self._first: dict[OpenStep, Origin] = {}  # the first non-finite output of unknown origin
        self._versions: dict[int, int] = {}

    def begin(self, given: Any) -> None:
        """Note the versions of the root's inputs, to recognise a tensor that is changed in place."""
        self._versions = {id(tensor): version_of(tensor) for _, tensor in tensors_in(given)}

    def examine(self, hook: OriginHook, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        """Check the output of a module, and search for the origin if it is not finite."""
        step = self.steps.current()
        if not step.armed or step.origin is not None or backward_task() != -1:
            return
        if step.armed & hook.recorded:
            suspicious = step.table.nonfinite > 0
        else:
            suspicious = self._suspicious(hook, module, output, step)
        if suspicious and not is_finite(output):
            self._search(hook.path, module, args, kwargs, output, step)
        if suspicious and not hook.path and step.origin is None:
            step.origin = self._in_batch(module, args, kwargs, step)

    def collect(self, step: OpenStep) -> None:
        """Read the pending sums before a step closes, and name the first non-finite output if no better origin is
        known.
        """
        pending, first = self._pending.pop(step, []), self._first.pop(step, None)
        if step.origin is None and pending:
            sums = [bool(torch.isfinite(total)) for _, total in pending]
            step.origin = next((origin for (origin, _), finite in zip(pending, sums, strict=True) if not finite), None)
        if step.origin is None and not step.table.nonfinite:
            step.origin = first

    def failed(self, path: str, error: Exception) -> None:
        """Count an error of ours; the user's step goes on."""
        self._counters.failed("origin_errors", f"searching the origin of a NaN in {path or '(root)'}", error)

    def _suspicious(self, hook: OriginHook, module: nn.Module, output: Any, step: OpenStep) -> bool:
        """Return whether the sum of an output is not finite; a large finite output may overflow it."""
        with without_torch_function(), torch.no_grad():
            for _, tensor in tensors_in(output):
                if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
                    continue
                total = local_of(tensor).sum(dtype=torch.float32 if tensor.element_size() < 4 else None)
                if self._devices.wants(total):
                    made = Origin("forward", hook.path, type(module).__name__)
                    self._pending.setdefault(step, []).append((made, total))
                elif not bool(torch.isfinite(total)):
                    return True
        return False

    def _search(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any, step: OpenStep
    ) -> None:
        if is_born_in((args, kwargs), output):
            step.origin = self._origin(path, module, args, kwargs, output)
        elif not is_sound(output) and step not in self._first:
            self._first[step] = _described(path, module, args, kwargs, output)

    def _in_batch(self, root: nn.Module, args: tuple[Any, ...], kwargs: Any, step: OpenStep) -> Origin | None:
        """Return the origin where the root was given what is not finite, and did not make it of its inputs in place."""
        if step in self._first and self._first[step].why:  # a parameter is not finite either
            return None
        bad = [
            TensorSummary(slot, summary_of_values(tensor))
            for slot, tensor in inputs_in(root.forward, args, kwargs)
            if not is_sound(tensor) and self._versions.get(id(tensor)) == version_of(tensor)
        ]
        return Origin.in_batch(bad) if bad else None

    def _origin(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> Origin | None:
        """Return the origin: the first time by running the module again, later from that result."""
        if path not in self._explained:
            self._explained[path] = self._explain(path, module, args, kwargs, output)
            return self._explained[path]
        known = self._explained[path]
        if known is None and is_sound(output):
            return None
        now = _described(path, module, args, kwargs, output)
        if known is None or now.why:
            return now
        return replace(now, operation=known.operation, source=known.source, why=known.why)

    def _explain(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> Origin | None:
        plain = _described(path, module, args, kwargs, output)
        if plain.why:  # a parameter is not finite: there is no operation to find
            return plain
        # Other ranks do not run it again, so a module that might wait for them is not run either.
        if may_communicate(module, [tensor for _, tensor in tensors_in((args, kwargs))]):
            self._counters.add("origins_without_operation")
            return plain
        try:
            found = run_again(path, module, args, kwargs)
        except Exception as error:  # it cannot be copied
            self._counters.note("origins_without_operation", f"copying {path or '(root)'} to run it again", error)
            return plain
        self._counters.add("modules_run_again")
        if found.origin is None and found.asked and is_sound(output):
            return None
        return found.origin or plain


class OriginHook(Hook):
    """Runs after a module's other hooks, with `recorded`, the probes that record its output."""

    __slots__ = ("finder", "path", "recorded")

    def __init__(self, finder: OriginFinder, path: str, recorded: int) -> None:
        self.finder = finder
        self.path = path
        self.recorded = recorded

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Examine the output."""
        if is_compiling() or is_tracing():
            return
        try:
            self.finder.examine(self, module, args, kwargs, output)
        except Exception as error:
            self.finder.failed(self.path, error)


class RootInputsHook(Hook):
    """Runs before the root's forward."""

    __slots__ = ("finder",)

    def __init__(self, finder: OriginFinder) -> None:
        self.finder = finder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the inputs of the root."""
        if is_compiling() or is_tracing():
            return
        try:
            self.finder.begin((args, kwargs))
        except Exception as error:
            self.finder.failed("", error)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; PyTorch does not count it for tensors of inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def _described(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> Origin:
    """Return an origin without its operation: inputs, outputs, and a parameter that is not finite."""
    inputs = [TensorSummary(slot, summary_of_values(t)) for slot, t in inputs_in(module.forward, args, kwargs)]
    bad = next(t for _, t in tensors_in(output) if not is_finite(t))
    kind, why = type(module).__name__, nonfinite_parameter(module)
    return Origin("forward", path, kind, inputs=tuple(inputs), output=summary_of_values(bad), why=why)
