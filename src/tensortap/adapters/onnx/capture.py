"""One run of a session, and copies of the tensors at chosen sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensortap.adapters import arrays
from tensortap.adapters.onnx.adapter import OnnxAdapter
from tensortap.adapters.onnx.entry import call
from tensortap.adapters.results import Captured


def capture(model: Any, inputs: Any, patterns: Sequence[Any]) -> Captured:
    """Run the session once with taps on."""
    return arrays.capture(OnnxAdapter(model), lambda: call(model, inputs), patterns)
