"""Calling a model so that nothing of it is left: buffers, gradients and random states are put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tensortap.adapters.torch.capture import call
from tensortap.adapters.torch.walk import tensors_in


@contextmanager
def untouched(model: nn.Module, backward: bool) -> Iterator[Callable[[Any], None]]:
    """Gives a function that calls the model with a batch, and where wanted differentiates the mean of its outputs."""
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    modes = {module: module.training for module in model.modules()}

    def run(batch: Any) -> None:
        with torch.set_grad_enabled(backward):
            output = call(model, batch)
        parts = [t.float().mean() for _, t in tensors_in(output) if t.requires_grad and not t.is_complex()]
        if backward and parts:
            torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]

    try:
        for parameter in gradients:
            parameter.grad = None
        with torch.random.fork_rng(devices=_devices(model)):
            yield run
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
        for module, training in modes.items():
            module.training = training


def _devices(model: nn.Module) -> list[torch.device]:
    """The CUDA devices a model is on, whose generators it draws from."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return [device for device in found if device.type == "cuda"]
