"""Where a NaN or an infinity is born in an object's layers."""

from __future__ import annotations

from typing import Any

from tensortap.adapters import locate as search
from tensortap.adapters.numpy.adapter import NumpyAdapter
from tensortap.adapters.numpy.entry import as_step
from tensortap.adapters.numpy.state import preserved
from tensortap.adapters.results import Origin


def locate(model: Any, batch: Any) -> Origin | None:
    """Run one step and name the first layer that made something not finite."""
    with preserved(model):
        return search.locate(NumpyAdapter(model), as_step(model, batch))
