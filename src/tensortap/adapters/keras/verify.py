"""The proof on the user's own model: the same bits with and without taps, nothing left over, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensortap.adapters.arrays import Array, ArrayProof
from tensortap.adapters.keras.entry import as_step
from tensortap.adapters.keras.layers import layers_of
from tensortap.adapters.keras.sight import arrays_of
from tensortap.adapters.keras.state import preserved
from tensortap.adapters.proof import prove
from tensortap.adapters.results import Verification


def verify(model: Any, batch: Any, probes: Sequence[Any], repeats: int, watch: Callable[..., Any]) -> Verification:
    """Run with and without taps from one state, and compare."""
    step = as_step(model, batch)
    if not model.built:
        step()  # the first call makes the variables
    with preserved(model) as restore:
        return prove(_Proving(model, step, restore), model, probes, repeats, watch)


class _Proving(ArrayProof):
    def __init__(self, model: Any, step: Callable[[], Any], restore: Callable[[], None]) -> None:
        super().__init__(lambda: arrays_of(step()))
        self._model = model
        self._restore = restore

    def observe(self) -> dict[str, Array]:
        """What a run leaves: outputs and all variables."""
        seen = super().observe()
        return seen | {f"variable {v.path}": np.array(v.numpy(), copy=True) for v in self._model.variables}

    def prepare(self) -> None:
        """Put the state back."""
        self._restore()

    def traces(self) -> dict[str, Any]:
        """Every attribute of every layer."""
        return {
            f"{layer.path}.{name}": id(value)
            for layer in layers_of(self._model)
            for name, value in vars(layer.value).items()
        }
