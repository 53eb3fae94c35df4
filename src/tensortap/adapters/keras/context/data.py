"""The data that a Keras model is trained with: the batch of a step, and whether two sets have the same classes."""

from __future__ import annotations

from typing import Any, Final

import keras
import numpy as np
import numpy.typing as npt

from tensortap.adapters.keras.context.describe import host_array

_MOST_CLASSES: Final = 1000
Array = npt.NDArray[Any]


def batch_in(args: tuple[Any, ...]) -> tuple[Array | None, Array | None]:
    """Return the inputs and targets of a step's arguments where it is given values, as PyTorch's steps are."""
    given = args[0] if args else None
    given = given[0] if isinstance(given, (list, tuple)) and len(given) == 1 else given
    if not isinstance(given, (list, tuple)) or len(given) < 2:
        return None, None
    return _values(given[0]), _values(given[1])


def _values(value: Any) -> Array | None:
    if keras.backend.backend() == "torch" and keras.ops.is_tensor(value):
        value = host_array(value)
    usable = isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "fiub"
    return value if usable else None


def share_of_unseen(y: Array | None, held_out: Array | None) -> float | None:
    """Return the share of held-out labels whose class is not in the training data; None if labels are not classes."""
    known, asked = _classes(y), _classes(held_out)
    if known is None or asked is None or len(np.unique(asked)) > _MOST_CLASSES:
        return None
    return float(np.mean(~np.isin(asked, known)))


def _classes(labels: Array | None) -> Array | None:
    """Return the class of each sample, of numbers or of rows that are one-hot."""
    if labels is None or not labels.size or labels.dtype.kind not in "fiub":
        return None
    if labels.ndim == 2 and labels.shape[1] > 1:
        one_hot = bool(np.all((labels == 0) | (labels == 1)) and np.all(labels.sum(1) == 1))
        return labels.argmax(1) if one_hot else None
    flat = labels.reshape(-1)
    return flat if labels.ndim == 1 or labels.shape[1:] == (1,) else None
