"""One eager call of a model, and copies of the tensors at chosen sites as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensortap.adapters import arrays
from tensortap.adapters.keras.adapter import delegated, watching
from tensortap.adapters.keras.entry import call
from tensortap.adapters.results import Captured


def capture(model: Any, inputs: Any, patterns: Sequence[Any]) -> Captured:
    """Call the model once with taps on."""
    if other := delegated("capture"):
        return other.capture(model, inputs, patterns)  # type: ignore[no-any-return]
    return arrays.capture(watching(model), lambda: call(model, inputs), patterns)
