"""JAX's libraries as one object: models of Flax, Equinox and Haiku, called by `apply` or by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import jax
import numpy as np

from tensortap.adapters.array_framework import ArrayFramework, Restore
from tensortap.adapters.jax.adapter import JaxAdapter
from tensortap.adapters.jax.capabilities import CAPABILITIES
from tensortap.adapters.jax.layers import kind_of
from tensortap.adapters.jax.state import gradient, preserved, traces
from tensortap.adapters.jax.tag import watchable
from tensortap.adapters.nested import call_with

_MODELS: Final = ("nnx", "equinox", "linen", "haiku")


class JaxFramework(ArrayFramework):
    """Models of JAX's libraries."""

    capabilities = CAPABILITIES

    def array_adapter(self, model: Any) -> JaxAdapter | None:
        """Return the adapter for a module, or None for other objects of JAX's libraries."""
        return JaxAdapter(model) if kind_of(model) in _MODELS else None

    def call(self, model: Any, inputs: Any) -> Any:
        """Call a model; one of Linen by its `apply`."""
        return call_with(model.apply if kind_of(model) == "linen" else model, inputs)

    @contextmanager
    def preserved(self, model: Any) -> Iterator[Restore]:
        """Restore the variables of an NNX model, with its random state; other models cannot change."""
        with preserved(model) as restore:
            yield restore

    def finished(self, value: Any) -> Any:
        """Wait for a call and its callbacks."""
        jax.block_until_ready(value)
        jax.effects_barrier()
        return value

    def on_host(self, value: Any) -> Any:
        """Return JAX's arrays as NumPy's."""
        return jax.tree.map(lambda leaf: np.asarray(leaf) if watchable(leaf) else leaf, value)

    def traces(self, model: Any) -> dict[str, Any]:
        """Return attributes of layers and their classes."""
        return traces(model)

    @contextmanager
    def isolated(self, model: Any, backward: bool) -> Iterator[Callable[[Any], object]]:
        """Yield a function that calls the model; with `backward`, gradients of the mean of its outputs too."""

        def mean(model: Any, batch: Any) -> Any:
            outputs = [leaf for leaf in jax.tree.leaves(self.call(model, batch)) if hasattr(leaf, "mean")]
            return sum(leaf.mean() for leaf in outputs)

        def run(batch: Any) -> None:
            result = gradient(mean, model)(model, batch) if backward else self.call(model, batch)
            jax.block_until_ready(jax.tree.leaves(result))

        with preserved(model):
            yield run


FRAMEWORK: Final = JaxFramework()
