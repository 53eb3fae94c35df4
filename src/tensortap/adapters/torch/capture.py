"""One call of a model, and copies of the tensors at chosen sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.adapters.base import choose
from tensortap.adapters.results import Captured
from tensortap.adapters.torch.adapter import TorchAdapter
from tensortap.adapters.torch.tensors import Taker
from tensortap.adapters.torch.walk import tensors_in
from tensortap.probes import as_probes
from tensortap.recorder import OpenStep, Point, Recorder


class Catcher(Taker):
    """Keeps copies instead of reducing."""

    __slots__ = ("found",)

    def __init__(self, recorder: Recorder, found: dict[str, Any]) -> None:
        super().__init__(recorder)
        self.found = found

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Copy a tensor under its site's name."""
        if not recomputed:
            name = point.text.removesuffix(":output")
            again = sum(key == name or key.rpartition("#")[0] == name for key in self.found)
            self.found[f"{name}#{again}" if again else name] = tensor.detach().clone()
        return -1


class _OneStep:
    """Nothing closes a step while capturing."""

    explicit = True

    def advance(self, step: OpenStep | None = None) -> None:
        """Nothing to do."""


def capture(model: nn.Module, inputs: Any, patterns: Sequence[Any]) -> Captured:
    """Call the model once with taps on."""
    found = Captured()
    adapter = TorchAdapter(model, fast_path="leave")
    recorder = Recorder(as_probes(patterns))
    adapter.attach(recorder, choose(recorder.probes, adapter.candidates()), _OneStep(), Catcher(recorder, found))
    try:
        found.output = call(model, inputs)
    finally:
        adapter.detach()
    return found


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with one value, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def as_step(model: nn.Module, batch: Any) -> Callable[[], Any]:
    """The user's own function of a step, or one that calls the model and differentiates what it returns."""
    return batch if callable(batch) and not isinstance(batch, (nn.Module, Tensor)) else lambda: _step(model, batch)


def _step(model: nn.Module, batch: Any) -> Any:
    output = call(model, batch)
    parts = [t.float().mean() for _, t in tensors_in(output) if t.requires_grad and not t.is_complex()]
    if parts:
        torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
    return output
