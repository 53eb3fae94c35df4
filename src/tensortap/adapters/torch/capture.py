"""One call of a model, and copies of the tensors at chosen sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tensortap.adapters.base import OneStep, offered
from tensortap.adapters.results import Captured
from tensortap.adapters.torch.adapter import TorchAdapter
from tensortap.adapters.torch.calls import call
from tensortap.adapters.torch.tensors import Taker
from tensortap.probes import as_probes
from tensortap.recorder import OpenStep, Point, Recorder


class Catcher(Taker):
    """Keeps copies instead of reducing."""

    __slots__ = ("found",)

    def __init__(self, recorder: Recorder, found: Captured) -> None:
        super().__init__(recorder)
        self.found = found

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Copy a tensor under its site's name."""
        if not recomputed:
            self.found.put(point.text, tensor.detach().clone())
        return -1


def capture(model: nn.Module, inputs: Any, patterns: Sequence[Any]) -> Captured:
    """Call the model once with taps on."""
    found = Captured()
    adapter = TorchAdapter(model, fast_path="leave")
    recorder = Recorder(as_probes(patterns))
    adapter.attach(recorder, offered(adapter, recorder.probes), OneStep(), Catcher(recorder, found))
    try:
        found.output = call(model, inputs)
    finally:
        adapter.detach()
    return found
