"""TensorFlow's tensors inside nested values, in hand or in a graph that is being traced."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras import tree

from tensortap.adapters.walk import arguments_in, values_in

Array = npt.NDArray[Any]
_NO_NUMBERS: Final = (tf.string, tf.resource, tf.variant)
_SPREAD: Final = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


class _Kind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        if isinstance(value, tf.Tensor):
            return value.dtype not in _NO_NUMBERS
        return isinstance(value, (*_SPREAD, np.ndarray)) and value.dtype not in _NO_NUMBERS


class Tensors(metaclass=_Kind):
    """Whatever counts as a tensor: TensorFlow's, ragged and sparse ones by their values, NumPy's arrays."""


def plain(value: Any) -> Any:
    """One of `Tensors` as a dense tensor."""
    if isinstance(value, tf.RaggedTensor):
        return value.flat_values
    return value.values if isinstance(value, _SPREAD) else value


def tensors_in(value: Any) -> list[tuple[str, Any]]:
    """Every tensor in a nested value, with its slot."""
    return [(slot, plain(found)) for slot, found in values_in(value, Tensors)]


def given_in(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every tensor that a function is called with."""
    return [(slot, plain(found)) for slot, found in arguments_in(function, args, kwargs, Tensors)]


def in_hand(value: Any) -> bool:
    """Whether a tensor has values, rather than a place in a graph."""
    return isinstance(value, np.ndarray) or hasattr(value, "numpy")


def array(value: Any) -> Array:
    """A tensor's elements, without a copy where they lie on the host."""
    return np.asarray(value)


def exchanged(value: Any, others: dict[int, Any]) -> Any:
    """A nested value with some tensors exchanged, by their identity."""
    return tree.map_structure(lambda item: others.get(id(item), item), value) if others else value
