"""A batch on its way through the model: its inputs, and which samples of the data set they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from tensortap.adapters.nested import values_in
from tensortap.errors import HarvestError, suggest
from tensortap.harvest.rows import Array, Ints

Key = str | int
TOKEN_IDS: Final = "input_ids"  # what most tokenizers call them


@runtime_checkable
class TensorLike(Protocol):
    """An array, or a tensor of some framework."""

    @property
    def shape(self) -> Any:
        """Its dimensions."""

    @property
    def dtype(self) -> Any:
        """The type of its elements."""

    def __getitem__(self, index: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What the model is called with, and the index of each of its samples in the data set."""

    inputs: Any
    samples: Ints
    number: int = 0  # among all batches

    def entry(self, key: Key) -> Array:
        """Return one of the inputs by its name, or by its place in a tuple; a single tensor is at place 0."""
        alone = isinstance(self.inputs, TensorLike)
        try:
            return as_array((self.inputs,)[key] if alone else self.inputs[key])  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            names = list(map(str, self.inputs)) if isinstance(self.inputs, Mapping) else []
            there = f"it has {', '.join(names)}" if names else f"it is a {type(self.inputs).__name__}"
            raise HarvestError(f"the batch has no {key!r}: {there}.{suggest(str(key), names)}") from None

    def token_ids(self, key: Key) -> Array | None:
        """Return the token ids, [samples, positions]; None where the batch has none under the usual name."""
        usual = key == TOKEN_IDS
        if usual and not (isinstance(self.inputs, Mapping) and key in self.inputs):
            return None
        ids = self.entry(key)
        return ids if ids.ndim == 2 and ids.dtype.kind in "iu" else None

    def only(self, chosen: Ints) -> InputBatch:
        """Return a batch of some of its samples, by their place in it."""
        return InputBatch(_rows(self.inputs, chosen, len(self.samples)), self.samples[chosen], self.number)


def size_of(inputs: Any) -> int:
    """Return how many samples are in a batch: the first dimension of its tensors, which must agree."""
    found = values_in(inputs, TensorLike)  # type: ignore[type-abstract]
    shapes = {slot: tuple(value.shape) for slot, value in found}
    lengths = {shape[0] for shape in shapes.values() if shape}
    if not lengths:
        raise HarvestError(
            f"a batch must hold tensors or arrays, got {type(inputs).__name__}: {str(inputs)[:80]}. Where the data "
            "yields samples, say how many make a batch: batch_size=32"
        )
    if len(lengths) > 1:
        listed = ", ".join(f"{slot or 'batch'} {list(shape)}" for slot, shape in shapes.items())
        raise HarvestError(f"the tensors of a batch must have the same first dimension, got {listed}")
    return int(lengths.pop())


def as_array(value: Any) -> Array:
    """Return a value of the batch as an array."""
    detached = value.detach().cpu() if hasattr(value, "detach") else value
    try:
        return np.asarray(detached)
    except TypeError:  # PyTorch's bfloat16, which NumPy has not
        if "bfloat16" not in str(getattr(detached, "dtype", "")):
            raise
        return np.asarray(detached.float()).astype(ml_dtypes.bfloat16)


def array_or_object(value: Any) -> Array:
    """Return a value of Python as an array; lists of different lengths as an array of one object."""
    try:
        return np.asarray(value)
    except ValueError:
        held = np.empty((), object)
        held[()] = value
        return held


def array_of_object(value: Any) -> Array | None:
    """Return an object that says that it is an array, such as an image, as one; None for others."""
    return np.asarray(value) if hasattr(value, "__array_interface__") or hasattr(value, "__array__") else None


def arrays_of_object(value: Any, name: str = "", depth: int = 6) -> dict[str, Array]:
    """Return the arrays in an object's attributes, at any depth: the weights of a model that is a plain object."""
    if isinstance(value, TensorLike):
        try:
            return {name: as_array(value)}
        except TypeError:  # such as JAX's typed keys of random numbers
            return {name: np.asarray(repr(value))}
    if isinstance(value, Mapping):
        inside: Any = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    else:
        inside = getattr(value, "__dict__", {}).items()
    found: dict[str, Array] = {}
    for key, item in inside if depth else ():
        found |= arrays_of_object(item, f"{name}.{key}", depth - 1)
    return found


def _rows(value: Any, chosen: Ints, size: int) -> Any:
    if isinstance(value, TensorLike):
        return value[chosen] if value.shape and value.shape[0] == size else value
    if isinstance(value, Mapping):
        return {key: _rows(item, chosen, size) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_rows(item, chosen, size) for item in value]
        return (
            type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        )  # a named tuple takes them singly
    return value
