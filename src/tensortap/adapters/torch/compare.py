"""Calling a model so that nothing of it is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tensortap.adapters.torch.calls import as_step, call
from tensortap.adapters.torch.state import preserved


@contextmanager
def untouched(model: nn.Module, backward: bool) -> Iterator[Callable[[Any], None]]:
    """Gives a function that calls the model with a batch, and where wanted differentiates the mean of its outputs."""

    def run(batch: Any) -> None:
        if backward:
            model.zero_grad(set_to_none=True)
            as_step(model, batch)()
        else:
            with torch.no_grad():
                call(model, batch)

    with preserved(model), torch.random.fork_rng(devices=_devices(model)):
        yield run


def _devices(model: nn.Module) -> list[torch.device]:
    """The CUDA devices a model is on, whose generators it draws from."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return [device for device in found if device.type == "cuda"]
