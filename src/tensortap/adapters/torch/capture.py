"""One call of a model, and copies of the tensors at chosen sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from tensortap.adapters.protocol import OneStep, offered
from tensortap.adapters.results import Captured
from tensortap.adapters.torch.adapter import TorchAdapter
from tensortap.adapters.torch.calls import call
from tensortap.adapters.torch.modules.tensors import TensorObserver, without_torch_function
from tensortap.adapters.torch.state import preserved
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.select.ports import OP_PORTS
from tensortap.select.probes import as_probes
from tensortap.select.sites import Candidate

_T = TypeVar("_T", bound=TensorObserver)


class Catcher(TensorObserver):
    """Keeps copies instead of reducing."""

    __slots__ = ("found",)

    def __init__(self, recorder: Recorder, found: Captured) -> None:
        super().__init__(recorder)
        self.found = found

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Copy a tensor under its site's name."""
        if point.probes and not recomputed:
            with without_torch_function():
                self.found.put(point.text, tensor.detach().clone())
        return -1


class Lister(TensorObserver):
    """Notes which places there are."""

    __slots__ = ("places",)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.places: dict[str, str] = {}

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Note the site and its operation."""
        if point.probes:
            self.places.setdefault(point.place.site, point.place.op)
        return -1


def capture(model: nn.Module, inputs: Any, patterns: Sequence[Any]) -> Captured:
    """Call the model once with taps on."""
    found = Captured()
    _call_with(model, inputs, patterns, partial(Catcher, found=found))
    return found


def operations(model: nn.Module, inputs: Any) -> list[Candidate]:
    """The operations that one call of the model does, in order; the model is left as it was."""
    with preserved(model):
        lister = _call_with(model, inputs, ["op:*"], Lister)
    return [Candidate(site, (op,), OP_PORTS) for site, op in lister.places.items()]


def _call_with(model: nn.Module, inputs: Any, patterns: Sequence[Any], make: Callable[[Recorder], _T]) -> _T:
    adapter = TorchAdapter(model, fast_path="leave")
    recorder = Recorder(as_probes(patterns))
    wanted = offered(adapter, recorder.probes)
    observer = make(recorder)
    adapter.attach(recorder, wanted, OneStep(), observer)
    try:
        output = call(model, inputs)
    finally:
        adapter.detach()
    if isinstance(observer, Catcher):
        observer.found.output = output
    return observer
