"""Rows: what is kept of one site in one batch, each row with the place it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Vectors of one site, one a row; `position` and `token` are -1 where a row has none.

    `indices` names the dimensions of the values where only the largest were kept.
    """

    values: Array
    sample: Ints
    position: Ints
    token: Ints
    indices: Array | None = None

    def __len__(self) -> int:
        return len(self.values)

    def take(self, chosen: Any) -> KeptRows:
        """Return some rows: by their numbers copied, by a slice as they lie there."""
        indices = None if self.indices is None else self.indices[chosen]
        return KeptRows(
            gathered(self.values, chosen), self.sample[chosen], self.position[chosen], self.token[chosen], indices
        )  # fmt: skip


def gathered(array: Array, rows: Any) -> Array:
    """Return rows of a matrix; those that are named by number are copied whole, which is faster than by elements."""
    if isinstance(rows, slice):
        return array[rows]
    whole = array.view(np.dtype((np.void, array.itemsize * array.shape[1]))).reshape(-1)
    return np.asarray(whole.take(rows).view(array.dtype).reshape(-1, array.shape[1]))


def joined(rows: list[KeptRows]) -> KeptRows:
    """Return several blocks of rows as one."""
    if len(rows) == 1:
        return rows[0]
    indices = [r.indices for r in rows if r.indices is not None]
    return KeptRows(
        np.concatenate([r.values for r in rows]),
        np.concatenate([r.sample for r in rows]),
        np.concatenate([r.position for r in rows]),
        np.concatenate([r.token for r in rows]),
        np.concatenate(indices) if indices else None,
    )


def mixed(seed: int, sample: Ints, position: Ints) -> npt.NDArray[np.uint64]:
    """Return a random number for each row, which depends on the seed and the row's place and on nothing else.

    >>> mixed(0, np.array([0, 0, 1]), np.array([0, 1, 0])) % np.uint64(10)
    array([5, 5, 8], dtype=uint64)

    It is splitmix64. Whoever computes a row, in whatever batch and process, comes to the same number.
    """
    with np.errstate(over="ignore"):
        return _scrambled(
            _scrambled(sample.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15) & _MASK))
            + position.astype(np.uint64)
        )


def _scrambled(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
