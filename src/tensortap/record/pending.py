"""Rows whose values come later than their places: reduced on a device, and on their way to the host.

A row's place, shape and type are known at once, and the step goes on. When it closes, its late rows are sent; whoever
needs the values first (as a rule the writer's thread) waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np  # noqa: F401  (for the example)
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


class LateNumber:
    """A number on its way to the host. Reading it waits."""

    def __init__(self, array: Array, wait: Callable[[], None]) -> None:
        self._array = array
        self._wait = wait

    def __float__(self) -> float:
        self._wait()
        return float(self._array)


class LateNumbers(Mapping[str, float]):
    """Numbers by name, some of them on their way. Their names are known; reading one that is not there yet waits.

    >>> numbers = LateNumbers({"loss": LateNumber(np.array(0.5), lambda: print("waiting")), "lr": 0.1})
    >>> list(numbers), numbers["lr"], numbers.waiting
    (['loss', 'lr'], 0.1, True)
    >>> numbers["loss"], numbers["loss"], numbers.waiting
    waiting
    (0.5, 0.5, False)
    """

    def __init__(self, numbers: Mapping[str, float | LateNumber]) -> None:
        self._numbers = dict(numbers)

    @property
    def waiting(self) -> bool:
        """Whether some have not been read yet."""
        return any(isinstance(number, LateNumber) for number in self._numbers.values())

    def __getitem__(self, name: str) -> float:
        number = self._numbers[name] = float(self._numbers[name])
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)
