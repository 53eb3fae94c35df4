"""Rows and numbers whose values are still being copied from a device to the host.

A row's site, shape and dtype are known at once, and the training step goes on. When the step closes, the copies are
started; whoever needs the values first (usually the writer's thread) waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np  # noqa: F401  (for the example)
import numpy.typing as npt

Array = npt.NDArray[Any]


class CopiedRows(NamedTuple):
    """Values that have reached the host: their row numbers, a `statistics.ROW` for each, and histograms by row."""

    rows: Array
    values: Array
    histograms: Mapping[int, tuple[int, Array]]


class PendingRows(Protocol):
    """Rows of one table whose values are on a device."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory reserved for the values."""

    def start_copy(self) -> None:
        """Start copying the values to the host, without waiting. A second call does nothing."""

    def subset(self, rows: Mapping[int, int]) -> PendingRows:
        """Return the rows that another table takes over, given as {old row number: new row number}."""

    def wait(self) -> CopiedRows:
        """Wait for the values and return them."""


class HostCopy(NamedTuple):
    """Host memory that a device is copying to. Its content is valid once the table's `wait()` has returned."""

    array: Array

    def __float__(self) -> float:
        return float(self.array)


class PendingNumber:
    """A number that is being copied to the host. `float()` waits for it."""

    def __init__(self, array: Array, wait: Callable[[], None]) -> None:
        self._array = array
        self._wait = wait

    def __float__(self) -> float:
        self._wait()
        return float(self._array)


class PendingMetrics(Mapping[str, float]):
    """Metrics of which some are still being copied to the host. Names are known at once; reading a value waits.

    >>> metrics = PendingMetrics({"loss": PendingNumber(np.array(0.5), lambda: print("waiting")), "lr": 0.1})
    >>> list(metrics), metrics["lr"], metrics.waiting
    (['loss', 'lr'], 0.1, True)
    >>> metrics["loss"], metrics["loss"], metrics.waiting
    waiting
    (0.5, 0.5, False)
    """

    def __init__(self, numbers: Mapping[str, float | PendingNumber]) -> None:
        self._numbers = dict(numbers)

    @property
    def waiting(self) -> bool:
        """Return whether some values have not been read yet."""
        return any(isinstance(number, PendingNumber) for number in self._numbers.values())

    def __getitem__(self, name: str) -> float:
        number = self._numbers[name] = float(self._numbers[name])
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)
