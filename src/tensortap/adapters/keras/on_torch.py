"""Keras on PyTorch: everything runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.backend import Backend
from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.keras.steps import KerasStepDetector
from tensortap.adapters.protocol import Clock
from tensortap.reduce.buffers import array_of, buffer_of


class TorchSight(Sight):
    """Records tensors of PyTorch."""

    def array(self, tensor: Any) -> npt.NDArray[Any]:
        """Without a copy on the host, for every type."""
        return array_of(buffer_of(tensor))

    def followed(self, tensor: Any, see: Callable[[Any], None]) -> Any:
        """By a view of its own, so that only what comes back through this layer is seen."""
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            return None
        passed = tensor.view_as(tensor)
        passed.register_hook(see)  # type: ignore[no-untyped-call]  # what it returns would replace the gradient: nothing
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            passed._keras_mask = mask  # type: ignore[attr-defined]
        return passed


class OnTorch(Backend):
    """One tap's view of PyTorch."""

    def __init__(self, observer: ArrayObserver, clock: Clock, limits: Sequence[tuple[str, float]]) -> None:
        super().__init__(TorchSight(observer, KerasStepDetector(observer.recorder, clock)))
