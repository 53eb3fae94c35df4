"""Copies of a user's batch, so that a model that works in place changes none of the user's values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

_SAME: Final = (str, bytes, int, float, complex, bool, type(None), type)
_DEPTH: Final = 8
CopyLeaf = Callable[[Any], Any]  # returns a copy of a tensor, and None for anything else


def copied(value: Any, copy_leaf: CopyLeaf) -> Any:
    """Return a nested value with copies of its tensors; what cannot be copied stays as it is.

    >>> import numpy as np
    >>> batch = {"x": [np.zeros(1)], "n": 3}
    >>> copied(batch, lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else None)
    {'x': [array([0.])], 'n': 3}
    """
    return _copied(value, copy_leaf, {}, _DEPTH)


def host_arrays(batch: Any) -> Any:
    """Return a batch whose tensors are NumPy arrays; types of low precision that NumPy lacks become float32.

    >>> host_arrays({"x": memoryview(b"ab"), "n": 3})["n"]
    3
    """
    return copied(batch, _host_array)


def _host_array(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    if not hasattr(leaf, "__array__") or not hasattr(leaf, "dtype"):
        return None
    own = leaf.detach().cpu() if hasattr(leaf, "detach") else leaf  # PyTorch's, which may want a gradient
    try:
        return np.asarray(own)
    except TypeError:  # bfloat16
        return np.asarray(own.float())


def _copied(value: Any, copy_leaf: CopyLeaf, memo: dict[int, Any], depth: int) -> Any:
    if isinstance(value, _SAME) or depth == 0:
        return value
    if id(value) not in memo:
        leaf = copy_leaf(value)
        memo[id(value)] = _container(value, copy_leaf, memo, depth - 1) if leaf is None else leaf
    return memo[id(value)]


def _container(value: Any, copy_leaf: CopyLeaf, memo: dict[int, Any], depth: int) -> Any:
    if isinstance(value, Mapping):
        return _mapping(value, {key: _copied(item, copy_leaf, memo, depth) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        items = [_copied(item, copy_leaf, memo, depth) for item in value]
        if type(value) in (tuple, list):
            return type(value)(items)
        return value._make(items) if hasattr(value, "_make") else value
    return _object(value, copy_leaf, memo, depth)


def _mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    try:
        other: Any = copy.copy(value)
        for key, item in items.items():
            other[key] = item
        return other
    except Exception:
        return value


def _object(value: Any, copy_leaf: CopyLeaf, memo: dict[int, Any], depth: int) -> Any:
    """Copy an object with attributes, such as a dataclass or a batch of graphs; functions and models are not copied."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or callable(value):
        return value
    try:
        other = copy.copy(value)
    except Exception:
        return value
    if other is value or other.__dict__ is attributes:
        return value
    other.__dict__.update({name: _copied(item, copy_leaf, memo, depth) for name, item in attributes.items()})
    return other
