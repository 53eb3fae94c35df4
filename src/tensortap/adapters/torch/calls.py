"""Calling a model with whatever a user has at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.adapters.torch.modules.nested import tensors_in


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
