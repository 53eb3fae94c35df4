"""Record the inputs and outputs of every module in one call, in order, so that two calls can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from tensortap.adapters.torch.modules.nested import tensors_in

MOST_ELEMENTS: Final = 1 << 28  # that are kept of one call


class TracedTensor(NamedTuple):
    """One tensor that enters or leaves a module."""

    path: str
    port: str  # input or output
    slot: str
    tensor: Tensor


Trace = list[TracedTensor]


@contextmanager
def traced(model: nn.Module) -> Iterator[Trace]:
    """Yield a list that fills with the tensors that modules take and give while the block runs."""
    found: Trace = []
    kept = 0

    def note(path: str, port: str, value: Any) -> None:
        nonlocal kept
        for slot, tensor in tensors_in(value):
            kept += tensor.numel()
            if tensor.is_floating_point() and kept <= MOST_ELEMENTS:
                found.append(TracedTensor(path, port, slot, tensor.detach().clone()))

    handles = [handle for path, module in model.named_modules() for handle in _hooks(path, module, note)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _hooks(path: str, module: nn.Module, note: Callable[[str, str, Any], None]) -> Iterator[Any]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        note(path, "input", (args, kwargs))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        note(path, "output", output)

    if path:
        yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after)


def first_change(before: Trace, after: Trace, changed: Callable[[Tensor, Tensor], bool]) -> tuple[str, str] | None:
    """Return the path and port of the first tensor that changed, where both calls went the same way.

    If a module's input had already changed, the module around it made the change.
    """
    for a, b in zip(before, after, strict=False):
        if a[:3] != b[:3] or a.tensor.shape != b.tensor.shape:
            return None
        if changed(a.tensor, b.tensor):
            return (a.path, "output") if a.port == "output" else (a.path.rpartition(".")[0], "input")
    return None
