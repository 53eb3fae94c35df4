"""One eager call of a model, and copies of the tensors at chosen sites as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensortap.adapters import arrays
from tensortap.adapters.keras.adapter import KerasAdapter
from tensortap.adapters.keras.entry import call
from tensortap.adapters.results import Captured


def capture(model: Any, inputs: Any, patterns: Sequence[Any]) -> Captured:
    """Call the model once with taps on."""
    return arrays.capture(KerasAdapter(model), lambda: call(model, inputs), patterns)
