"""Running a user's model for a look at it: one step, and everything a step can change, kept and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.adapters.nested import call_with
from tensortap.adapters.rng import preserve_rng_state
from tensortap.adapters.torch.modules.nested import tensors_in


def as_step(model: nn.Module, batch: Any) -> Callable[[], Any]:
    """Return the user's own function of a step, or one that calls the model and differentiates what it returns."""
    return batch if callable(batch) and not isinstance(batch, (nn.Module, Tensor)) else lambda: _step(model, batch)


def _step(model: nn.Module, batch: Any) -> Any:
    output = call_with(model, batch)
    parts = [t.float().mean() for _, t in tensors_in(output) if t.requires_grad and not t.is_complex()]
    if parts:
        torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
    return output


@contextmanager
def preserved(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Gives a function that puts parameters, buffers, gradients, modes and random states back; calls it at the end."""
    state = {name: tensor.detach().clone() for name, tensor in _state(model).items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    modes = {module: module.training for module in model.modules()}
    seed, restore_rng_state = torch.get_rng_state(), preserve_rng_state()

    def restore() -> None:
        with torch.no_grad():
            for name, tensor in _state(model).items():
                _put_back(tensor, state[name])
        for name, parameter in model.named_parameters():
            kept = gradients[name]
            parameter.grad = None if kept is None else kept.clone()
        for module, training in modes.items():
            module.training = training
        torch.set_rng_state(seed)
        restore_rng_state()

    try:
        yield restore
    finally:
        restore()


def _put_back(tensor: Tensor, kept: Tensor) -> None:
    """Only what has changed is written, so that nobody's saved tensors are touched for nothing."""
    if tensor.shape != kept.shape or not _equal(tensor, kept):
        tensor.copy_(kept)


def _equal(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN here: weights that are NaN already have not changed."""
    floats = a.is_floating_point() or a.is_complex()
    return torch.equal(a, b) or (floats and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _state(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if not nn.parameter.is_lazy(p)}
    return found | {f"buffer {name}": b for name, b in model.named_buffers()}
