"""One call of an object, and copies of the arrays at chosen sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensortap.adapters import arrays
from tensortap.adapters.numpy.adapter import NumpyAdapter
from tensortap.adapters.numpy.entry import call
from tensortap.adapters.results import Captured


def capture(model: Any, inputs: Any, patterns: Sequence[Any]) -> Captured:
    """Call the object once with taps on."""
    return arrays.capture(NumpyAdapter(model), lambda: call(model, inputs), patterns)
