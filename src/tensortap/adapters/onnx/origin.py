"""Where a NaN or an infinity is born in a session's graph."""

from __future__ import annotations

from typing import Any

from tensortap.adapters import locate as search
from tensortap.adapters.onnx.adapter import OnnxAdapter
from tensortap.adapters.onnx.entry import as_step
from tensortap.adapters.results import Origin


def locate(model: Any, batch: Any) -> Origin | None:
    """Run once and name the first tensor that is not finite although its node was given finite ones."""
    return search.locate(OnnxAdapter(model), as_step(model, batch))
