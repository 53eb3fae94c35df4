"""Read the parameters of a request, with errors that say what would be right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import numpy as np

from tensortap.errors import RunError
from tensortap.view.api.grid import Ints

WIDEST: Final = 4096


class RequestError(RunError):
    """A request that cannot be answered as it is; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Query:
    """The parameters of one request.

    >>> query = Query({"width": "600", "from": "10"})
    >>> query.number("width", 0), query.span(np.arange(100))
    (600, (10, 100))
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = dict(given)

    def __str__(self) -> str:
        return urlencode(sorted(self._given.items()))

    def text(self, name: str, default: str = "") -> str:
        """Return a word."""
        return self._given.get(name, default)

    def number(self, name: str, default: Any = None) -> Any:
        """Return a whole number."""
        given = self._given.get(name, "")
        try:
            return _whole(given) if given else default
        except ValueError:
            raise RequestError(f"{name} must be a whole number, got {given[:40]!r}", f"write {name}=600") from None

    @property
    def width(self) -> int:
        """How many columns the screen has room for."""
        return int(min(max(self.number("width", 800), 1), WIDEST))

    def span(self, steps: Ints) -> tuple[int, int]:
        """Return which of the steps are asked for, from the first to before the last; `from` and `to` are included."""
        low = np.searchsorted(steps, self._edge("from", -math.inf), "left")
        high = np.searchsorted(steps, self._edge("to", math.inf), "right")
        return int(low), max(int(low), int(high))

    def window(self, name: str, size: int) -> tuple[int, int]:
        """Return a part `a:b` of an axis, within it."""
        first, colon, last = self._given.get(name, ":").partition(":")
        try:
            low, high = _whole(first or "0"), _whole(last or str(size)) if colon else _whole(first) + 1
        except ValueError:
            raise RequestError(f"{name} must be a range, got {self._given[name]!r}", f"write {name}=0:100") from None
        low = min(max(low, 0), size)
        return low, min(max(high, low), size)

    def _edge(self, name: str, default: float) -> float:
        given = self._given.get(name, "")
        try:
            edge = float(given) if given else default
        except ValueError:
            raise RequestError(f"{name} must be a step, got {given!r}", f"write {name}=100") from None
        return default if math.isnan(edge) else edge


def _whole(text: str) -> int:
    """Return a whole number of at most 64 bits; ValueError for anything else."""
    number = int(text)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{text[:40]} has more than 64 bits")
    return number
