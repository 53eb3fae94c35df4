"""The proof on the user's own object: the same bits with and without taps, nothing left over, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensortap.adapters.arrays import Array, ArrayProof
from tensortap.adapters.numpy.entry import as_step
from tensortap.adapters.numpy.layers import layers_of
from tensortap.adapters.numpy.state import preserved
from tensortap.adapters.proof import prove
from tensortap.adapters.results import Verification


def verify(model: Any, batch: Any, probes: Sequence[Any], repeats: int, watch: Callable[..., Any]) -> Verification:
    """Run with and without taps from one state, and compare."""
    with preserved(model) as restore:
        return prove(_Proving(model, as_step(model, batch), restore), model, probes, repeats, watch)


class _Proving(ArrayProof):
    def __init__(self, model: Any, step: Callable[[], Any], restore: Callable[[], None]) -> None:
        super().__init__(step)
        self._model = model
        self._restore = restore

    def observe(self) -> dict[str, Array]:
        """What a run leaves: outputs and all arrays that layers hold."""
        seen = super().observe()
        return seen | {f"array {found.path}": found.value.copy() for found in layers_of(self._model).arrays}

    def prepare(self) -> None:
        """Put the state back."""
        self._restore()

    def traces(self) -> dict[str, Any]:
        """The classes of all layers with what they define, and every slot."""
        found = layers_of(self._model)
        classes = {cls for layer in found.layers for cls in type(layer.value).__mro__ if cls is not object}
        entries = {f"class {cls.__qualname__}.{name}": id(v) for cls in classes for name, v in list(vars(cls).items())}
        slots = {f"slot {f.path}": id(f.holder.get()) for f in found.functions if f.holder is not None}
        return entries | slots | {f"type of {layer.path}": type(layer.value) for layer in found.layers}
