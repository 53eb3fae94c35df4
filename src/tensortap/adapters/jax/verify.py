"""The proof on the user's own model: the same bits with and without taps, nothing left over, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tensortap.adapters.arrays import ArrayProof
from tensortap.adapters.jax.entry import as_step
from tensortap.adapters.jax.state import kept, traces
from tensortap.adapters.jax.tag import watchable
from tensortap.adapters.proof import prove
from tensortap.adapters.results import Verification


def verify(model: Any, batch: Any, probes: Sequence[Any], repeats: int, watch: Callable[..., Any]) -> Verification:
    """Run with and without taps, and compare."""
    return prove(_Proving(model, as_step(model, batch)), model, probes, repeats, watch)


class _Proving(ArrayProof):
    def __init__(self, model: Any, step: Callable[[], Any]) -> None:
        super().__init__(lambda: _on_host(model, step))
        self._model = model

    def traces(self) -> dict[str, Any]:
        """Attributes of layers and their classes."""
        return traces(self._model)


def _on_host(model: Any, step: Callable[[], Any]) -> Any:
    with kept(model):
        return jax.tree.map(lambda leaf: np.asarray(leaf) if watchable(leaf) else leaf, step())
