"""Turn values into what JSON can hold: no NaN, no infinity, no arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensortap.record.step import Record
from tensortap.reduce.statistics import COLUMNS


class PlainDict(dict[str, Any]):
    """A dict that holds plain values only: `plain` leaves it as it is."""


class PlainList(list[Any]):
    """A list that holds plain values only: `plain` leaves it as it is."""


def plain(value: Any) -> Any:
    """Return the value with lists for arrays and null for what is not finite.

    >>> plain({"mean": float("nan"), "shape": (2, 3)})
    {'mean': None, 'shape': [2, 3]}
    """
    kind = type(value)
    if value is None or kind is str or kind is int:  # most values, and quicker to tell than what follows
        return value
    if kind is float or isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, int)):
        return value
    if isinstance(value, (PlainDict, PlainList)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist() if value.dtype.kind in "iub" else plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def row(record: Record) -> dict[str, Any]:
    """Return a record as a JSON object: its columns, then the numbers that reducers gave."""
    return plain({name: record[name] for name in COLUMNS} | {"numbers": record.numbers})  # type: ignore[no-any-return]


encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
"""A plain value as compact JSON that every parser takes."""
