"""The proof on the user's own model: the same bits with and without taps, nothing left over, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.adapters.proof import GRADIENT, prove
from tensortap.adapters.results import Verification
from tensortap.adapters.torch.calls import as_step
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.state import preserved


def verify(
    model: nn.Module, batch: Any, probes: Sequence[Any], repeats: int, watch: Callable[..., Any]
) -> Verification:
    """Run with and without taps from one seed and state, and compare."""
    with preserved(model) as restore:
        return prove(_Proving(model, as_step(model, batch), restore), model, probes, repeats, watch)


class _Proving:
    def __init__(self, model: nn.Module, step: Callable[[], Any], restore: Callable[[], None]) -> None:
        self._model = model
        self._step = step
        self._restore = restore

    def observe(self) -> dict[str, Tensor]:
        """What a run leaves: outputs, gradients, buffers, parameters and the random state."""
        self._restore()
        model = self._model
        seen = {f"output{slot}": t.detach().clone() for slot, t in tensors_in(self._step())}
        seen |= {f"{GRADIENT}{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
        seen |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
        seen["random state"] = torch.get_rng_state()
        return seen

    def run(self) -> None:
        """Run once."""
        self._step()

    def prepare(self) -> None:
        """Put the state back."""
        self._restore()

    def traces(self) -> dict[str, Any]:
        """Everything a careless tap could leave on a model."""
        return {
            f"{path or '(root)'}.{name}": list(value) if isinstance(value, dict) else type(value)
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
        } | {
            **{f"{name} hooks": list(p._backward_hooks or ()) for name, p in self._model.named_parameters()},
            "function modes": torch._C._len_torch_function_stack(),
        }

    def same(self, a: Tensor, b: Tensor) -> bool:
        """Bit for bit, NaN equal to the same NaN."""
        if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
            return False
        if a.layout is not torch.strided:
            return torch.equal(a.to_dense(), b.to_dense())
        flat = (a.contiguous().reshape(-1), b.contiguous().reshape(-1))
        return torch.equal(*(t.view(torch.uint8) if t.numel() else t for t in flat))

    def apart(self, a: Tensor, b: Tensor) -> Any:
        """The largest difference of two elements."""
        return (a.double() - b.double()).abs().max() if a.shape == b.shape else "?"
