"""Keras on PyTorch, where everything runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.backends.base import KerasBackend
from tensortap.adapters.keras.observer import KerasObserver, KerasStepDetector
from tensortap.reduce.buffers import array_of, buffer_of


class KerasTorchObserver(KerasObserver):
    """Record PyTorch tensors."""

    def array(self, tensor: Any) -> npt.NDArray[Any]:
        """Return the elements without a copy on the host, for every dtype."""
        return array_of(buffer_of(tensor))

    def with_gradient_hook(self, tensor: Any, hook: Callable[[Any], None]) -> Any:
        """Return a view, so that only the gradient that comes back through this layer is seen."""
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            return None
        view = tensor.view_as(tensor)
        view.register_hook(hook)  # type: ignore[no-untyped-call]  # it returns nothing, so the gradient stays
        return view


class KerasOnTorch(KerasBackend):
    """One tap's side of PyTorch."""

    def __init__(self, arrays: ArrayObserver, limits: Sequence[tuple[str, float]]) -> None:
        super().__init__(KerasTorchObserver(arrays, KerasStepDetector(arrays.recorder)))
