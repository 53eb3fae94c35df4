"""Rows whose values come later than their places: reduced on a device, and on their way to the host.

A row's place, shape and type are known at once, and the step goes on. When it closes, its late rows are sent; whoever
needs the values first (as a rule the writer's thread) waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


class Arrived(NamedTuple):
    """Values that have come: the rows they belong to, a `kernels.ROW` for each, and histograms by row."""

    rows: Array
    values: Array
    histograms: Mapping[int, tuple[int, Array]]


class Late(Protocol):
    """Some late rows of one table."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that wait for them."""

    def send(self) -> None:
        """Start them on their way, without waiting. A second call does nothing."""

    def part(self, places: Mapping[int, int]) -> Late:
        """Those of them that another table takes over: its rows, by the rows they were."""

    def arrive(self) -> Arrived:
        """Wait for the values."""


class Landing(NamedTuple):
    """Host memory that a device's numbers are on their way to. Worth reading once the rows have arrived."""

    array: Array

    def __float__(self) -> float:
        return float(self.array)
