"""The state of a JAX model that a call may change, and how its library differentiates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from tensortap.adapters.jax.layers import kind_of, layers_of


@contextmanager
def preserved(model: Any) -> Iterator[Callable[[], None]]:
    """Yield a function that puts the variables of a model of NNX back, its random state too; others cannot change."""
    before = jax.tree.map(lambda leaf: leaf, _state(model))

    def restore() -> None:
        if before is not None:
            sys.modules["flax.nnx"].update(model, before)

    try:
        yield restore
    finally:
        restore()


def gradient(function: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Return the gradient by a function's first argument, a model."""
    kind = kind_of(model)
    if kind == "nnx":
        found = sys.modules["flax.nnx"].grad(function)
    elif kind == "equinox":
        found = sys.modules["equinox"].filter_grad(function)
    else:
        found = jax.grad(function, allow_int=True)
    return found  # type: ignore[no-any-return]


def traces(model: Any) -> dict[str, Any]:
    """Return everything a tap could leave behind: attributes of layers and of their classes."""
    found: dict[str, Any] = {}
    for path, module, _ in layers_of(model):
        own = [(name, value) for name, value in vars(module).items() if not name.startswith("_pytree")]
        found |= {f"{path}.{name}": id(value) for name, value in own}  # NNX changes its own notes at every turn
        found[f"{path}()"] = [base.__dict__.get("__call__") for base in type(module).__mro__]
    return found


def _state(model: Any) -> Any:
    return sys.modules["flax.nnx"].state(model) if kind_of(model) == "nnx" else None
