"""The proof on the user's own session: the same bits with and without taps, nothing left over, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensortap.adapters.arrays import ArrayProof
from tensortap.adapters.onnx.entry import as_step
from tensortap.adapters.proof import prove
from tensortap.adapters.results import Verification


def verify(model: Any, batch: Any, probes: Sequence[Any], repeats: int, watch: Callable[..., Any]) -> Verification:
    """Run with and without taps, and compare."""
    return prove(_Proving(model, as_step(model, batch)), model, probes, repeats, watch)


class _Proving(ArrayProof):
    def __init__(self, session: Any, step: Callable[[], Any]) -> None:
        super().__init__(step)
        self._session = session

    def traces(self) -> dict[str, Any]:
        """Every attribute of the session."""
        return {name: id(value) for name, value in vars(self._session).items()}
