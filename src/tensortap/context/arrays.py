"""Describe the arrays of a training: ranges, classes, and the loss of a constant answer."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_MOST: Final = 16_384  # number of elements that are read; of larger arrays evenly spaced ones


def describe_array(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Return shape, dtype and range.

    >>> describe_array(np.array([0.0, 2.0]))["max"]
    2.0
    """
    found: dict[str, Any] = {"shape": list(array.shape), "dtype": str(array.dtype)}
    if not array.size or array.dtype.kind not in "fiub":
        return found
    values = _sampled(array).astype(np.float64)
    finite = values[np.isfinite(values)]
    found["nonfinite"] = int(values.size - finite.size)
    if finite.size:
        found |= {"min": float(finite.min()), "max": float(finite.max()), "mean": float(finite.mean())}
        found["std"] = float(finite.std())
    return found


def describe_labels(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Return facts about targets: their range, and classes if they are integers or one-hot rows."""
    found = describe_array(array)
    if "min" not in found:
        return found
    values = _sampled(array)
    whole = bool(np.all(values == np.floor(values)))
    found["binary"] = bool(np.all((values == 0) | (values == 1)))
    found["distinct"] = len(np.unique(values[:1024]))
    if array.ndim > 1 and array.shape[-1] > 1:
        sums = array.astype(np.float64).sum(-1)
        found["row_sums"] = [float(sums.min()), float(sums.max())]
        if found["binary"] and bool(np.all(sums == 1)):
            found |= _counted(array.argmax(-1))
    elif whole and found["distinct"] <= 64:
        found |= _counted(values.astype(np.int64))
    return found


def chance_of(counts: dict[int, int]) -> float | None:
    """Return the cross entropy of always answering with the shares of the classes.

    >>> round(chance_of({0: 5, 1: 5}), 4)
    0.6931
    """
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values()) if total else None


def _counted(classes: npt.NDArray[Any]) -> dict[str, Any]:
    names, counts = np.unique(classes, return_counts=True)
    return {
        "classes": len(names), "share": float(counts.max() / counts.sum()), "most": int(names[counts.argmax()]),
        "counts": {int(c): int(n) for c, n in zip(names[:64], counts[:64], strict=True)},
    }  # fmt: skip


def _sampled(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    flat = array.reshape(-1)
    return flat[:: max(1, math.ceil(flat.size / _MOST))]
