"""The arithmetic of the NumPy kernel: moments of blocks, and how they become a row. The C kernel gives the same bits.

It follows csrc/ step by step, since equal results need equal roundings: blocks of 4096 elements, lanes that are
added in a fixed order, deviations from the mean in double, Chan's formula between blocks and chunks.
Where the C code loops over elements, whole chunks are handled here by one NumPy call per step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.types import DTYPE_CODE

Array = npt.NDArray[Any]
BLOCK: Final = 4096
_ALMOST: Final = 1 - 2.0**-44  # one, but for what rounding may have added
_WIDE_RANGE: Final = (DTYPE_CODE["float64"], DTYPE_CODE["complex128"])


_LANES: Final = {np.dtype(np.float32): 32, np.dtype(np.float64): 16}  # of pass one


@dataclass(slots=True)
class Moments:
    """Counts and moments of some elements: `n` of them finite."""

    n: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    min: float = math.inf
    max: float = -math.inf
    mean: float = 0.0
    m2: float = 0.0
    l1: float = 0.0

    def add(self, other: Moments) -> None:
        """Chan's formula, in the same order of operations as `merge` in C."""
        self.nan += other.nan
        self.posinf += other.posinf
        self.neginf += other.neginf
        self.zeros += other.zeros
        if other.n == 0:
            return
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)
        self.l1 += other.l1
        if self.n == 0:
            self.n, self.mean, self.m2 = other.n, other.mean, other.m2
            return
        na, nb = float(self.n), float(other.n)
        n, delta = na + nb, other.mean - self.mean
        self.mean += delta * (nb / n)
        self.m2 += other.m2 + delta * delta * (na * (nb / n))
        self.n += other.n


def _fold(lanes: Array) -> Array:
    while (half := lanes.shape[-1] // 2) >= 1:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _padded(x: Array, step: int) -> Array:
    short = -x.shape[-1] % step
    return np.pad(x, ((0, 0), (0, short))) if short else x


def _lane_sums(x: Array, lanes: int) -> Array:
    """The sum of each block (a row of x): lanes added step by step in x's own type, then folded."""
    steps = _padded(x, lanes).reshape(len(x), -1, lanes)
    total = np.zeros((len(x), lanes), x.dtype)
    for i in range(steps.shape[1]):
        total += steps[:, i]
    return _fold(total)


def _centre(x: Array, low: Array, high: Array) -> tuple[Array, ...]:
    """Mean, squared deviations and sum of magnitudes of each block, by one or two rounds around a shift."""
    sums = _lane_sums(x, _LANES[x.dtype]).astype(np.float64)
    low, high, wide = low.astype(np.float64), high.astype(np.float64), x.astype(np.float64)
    shift = np.where(np.isfinite(sums), sums / x.shape[1], 0.5 * low + 0.5 * high)
    found, again = _round(wide, np.clip(shift, low, high))
    if again.any():
        more, _ = _round(wide[again], np.clip(found[0][again], low[again], high[again]))
        for whole, part in zip(found, more, strict=True):
            whole[again] = part
    return found


def _round(x: Array, shift: Array) -> tuple[tuple[Array, ...], Array]:
    """The moments of each block from sums around a shift; where the shift was too far from the mean."""
    d = x - shift[:, None]
    sum_d, sum_q, l1 = (_lane_sums(values, 16) for values in (d, d * d, np.abs(x)))
    offset = sum_d / x.shape[1]
    bias = sum_d * offset
    m2 = sum_q - bias
    return (shift + offset, np.where(m2 > 0, m2, 0.0), l1), bias > 0.5 * sum_q


def _finite_blocks(x: Array) -> list[Moments]:
    """Blocks (the rows of x) whose elements are all finite."""
    n = x.shape[1]
    low, high = x.min(axis=1), x.max(axis=1)
    zeros = n - np.count_nonzero(x, axis=1)
    mean, m2, l1 = low.astype(np.float64), np.zeros(len(x)), n * np.abs(low.astype(np.float64))
    varied = low != high
    if varied.any():
        mean[varied], m2[varied], l1[varied] = _centre(x[varied], low[varied], high[varied])
    rows = zip(zeros, low, high, mean, m2, l1, strict=True)
    return [Moments(n, 0, 0, 0, int(z), *map(float, rest)) for z, *rest in rows]


def _any_block(x: Array) -> Moments:
    finite = x[np.isfinite(x)]
    moments = _finite_blocks(finite[None])[0] if finite.size else Moments()
    moments.nan = int(np.count_nonzero(np.isnan(x)))
    moments.posinf = int(np.count_nonzero(x == np.inf))
    moments.neginf = int(np.count_nonzero(x == -np.inf))
    return moments


def blocks(x: Array) -> Iterator[Moments]:
    """The moments of each block of a chunk."""
    full = x[: x.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    clean: Array = np.asarray(np.isfinite(full).all(axis=1))
    done = iter(_finite_blocks(full[clean]) if clean.any() else ())
    for block, is_clean in zip(full, clean, strict=True):
        yield next(done) if is_clean else _any_block(block)
    if x.size > full.size:
        yield _any_block(x[full.size :])


def scale_power(dtype: int, m: Moments) -> int:
    """A power of two by which to scale doubles whose squares would leave their range; 0 for others."""
    if dtype not in _WIDE_RANGE or m.n == 0:
        return 0
    most = max(abs(m.min), abs(m.max))
    return -600 if most > 2.0**480 else 600 if 0 < most < 2.0**-400 else 0


def finished(m: Moments, scaled: Moments, power: int) -> tuple[float, ...]:
    """The six statistics: ends from the elements as they are, moments from the scaled ones."""
    if m.n == 0:
        return math.nan, math.nan, math.nan, math.nan, 0.0, 0.0
    low, high, n, unscale = m.min + 0.0, m.max + 0.0, float(m.n), 2.0**-power
    mean = min(max(scaled.mean * unscale + 0.0, low), high)
    std, l1 = math.sqrt(scaled.m2 / n) * unscale, scaled.l1 * unscale
    l2 = math.sqrt(scaled.m2 + n * scaled.mean * scaled.mean)
    over = l2 * unscale == math.inf and l2 * _ALMOST * unscale < math.inf  # by rounding only
    return low, high, mean, std, l1, sys.float_info.max if over else l2 * unscale
