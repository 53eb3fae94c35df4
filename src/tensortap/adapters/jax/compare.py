"""Calling a model for a comparison: its state is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from tensortap.adapters.jax.entry import call
from tensortap.adapters.jax.state import gradient, kept


@contextmanager
def untouched(model: Any, backward: bool) -> Iterator[Callable[[Any], None]]:
    """Gives a function that calls the model with a batch; with `backward`, gradients of the mean of its outputs too."""

    def mean(model: Any, batch: Any) -> Any:
        outputs = [leaf for leaf in jax.tree.leaves(call(model, batch)) if hasattr(leaf, "mean")]
        return sum(leaf.mean() for leaf in outputs)

    def run(batch: Any) -> None:
        result = gradient(mean, model)(model, batch) if backward else call(model, batch)
        jax.block_until_ready(jax.tree.leaves(result))

    with kept(model):
        yield run
