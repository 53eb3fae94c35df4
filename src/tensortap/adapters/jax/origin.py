"""Where a NaN or an infinity is born in a model of JAX."""

from __future__ import annotations

from typing import Any

from tensortap.adapters import locate as search
from tensortap.adapters.jax.adapter import JaxAdapter
from tensortap.adapters.jax.entry import as_step
from tensortap.adapters.jax.state import kept
from tensortap.adapters.results import Origin


def locate(model: Any, batch: Any) -> Origin | None:
    """Run once and name the first layer whose output is not finite although it was given finite numbers."""
    with kept(model):
        return search.locate(JaxAdapter(model), as_step(model, batch))
