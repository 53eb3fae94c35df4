"""The proof on the user's own object: the same bits with and without taps, nothing left over, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensortap.adapters.arrays import Array, arrays_in
from tensortap.adapters.numpy.entry import as_step
from tensortap.adapters.numpy.layers import layers_of
from tensortap.adapters.numpy.state import preserved
from tensortap.adapters.proof import prove
from tensortap.adapters.results import Verification


def verify(model: Any, batch: Any, probes: Sequence[Any], repeats: int, watch: Callable[..., Any]) -> Verification:
    """Run with and without taps from one state, and compare."""
    with preserved(model) as restore:
        return prove(Proving(model, as_step(model, batch), restore), model, probes, repeats, watch)


class Proving:
    """An object and one step of it."""

    def __init__(self, model: Any, step: Callable[[], Any], restore: Callable[[], None] = lambda: None) -> None:
        self._model = model
        self._step = step
        self._restore = restore

    def observe(self) -> dict[str, Array]:
        """What a run leaves: outputs and all arrays that layers hold."""
        self._restore()
        seen = {f"output{slot}": array.copy() for slot, array in arrays_in(self._step())}
        return seen | {f"array {found.path}": found.value.copy() for found in layers_of(self._model).arrays}

    def prepare(self) -> None:
        """Put the state back."""
        self._restore()

    def run(self) -> None:
        """Run once."""
        self._step()

    def traces(self) -> dict[str, Any]:
        """The classes of all layers with what they define, and every attribute."""
        found = layers_of(self._model)
        classes = {cls for layer in found.layers for cls in type(layer.value).__mro__ if cls is not object}
        entries = {f"class {cls.__qualname__}.{name}": id(v) for cls in classes for name, v in list(vars(cls).items())}
        slots = {f"slot {f.path}": id(f.holder.get()) for f in found.functions if f.holder is not None}
        return entries | slots | {f"type of {layer.path}": type(layer.value) for layer in found.layers}

    def same(self, a: Array, b: Array) -> bool:
        """Bit for bit."""
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()

    def apart(self, a: Array, b: Array) -> Any:
        """The largest difference of two elements."""
        return np.abs(a.astype(np.complex128) - b).max() if a.shape == b.shape else "?"
