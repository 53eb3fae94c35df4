"""Where a NaN or an infinity is born in a model's layers."""

from __future__ import annotations

from typing import Any

from tensortap.adapters import locate as search
from tensortap.adapters.keras.adapter import KerasAdapter
from tensortap.adapters.keras.entry import as_step
from tensortap.adapters.keras.state import preserved
from tensortap.adapters.results import Origin


def locate(model: Any, batch: Any) -> Origin | None:
    """Run one step eagerly and name the first layer that made something not finite."""
    with preserved(model):
        return search.locate(KerasAdapter(model), as_step(model, batch))
