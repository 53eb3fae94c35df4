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
    m3: float = 0.0
    m4: float = 0.0
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
            self.n, self.mean, self.m2, self.m3, self.m4 = other.n, other.mean, other.m2, other.m3, other.m4
            return
        na, nb = float(self.n), float(other.n)
        n, delta = na + nb, other.mean - self.mean
        fa, fb, square = na / n, nb / n, delta * delta
        self.mean += delta * fb
        self.m4 += (
            other.m4
            + square * square * (na * fb) * (fa * fa - fa * fb + fb * fb)
            + 6 * square * (fa * fa * other.m2 + fb * fb * self.m2)
            + 4 * delta * (fa * other.m3 - fb * self.m3)
        )
        self.m3 += other.m3 + square * delta * (na * fb) * (fa - fb) + 3 * delta * (fa * other.m2 - fb * self.m2)
        self.m2 += other.m2 + square * (na * fb)
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
    """Mean, sums of powers of deviations and of magnitudes of each block, by one or two rounds around a shift."""
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
    square = d * d
    terms = (d, square, square * d, square * square, np.abs(x))
    sum_d, sum_q, sum_c, sum_f, l1 = (_lane_sums(values, 16) for values in terms)
    offset = sum_d / x.shape[1]
    bias = sum_d * offset
    m2 = sum_q - bias
    m3 = sum_c - 3 * offset * sum_q + 2 * offset * bias
    m4 = sum_f - 4 * offset * sum_c + 6 * offset * offset * sum_q - 3 * offset * offset * bias
    return (shift + offset, np.where(m2 > 0, m2, 0.0), m3, m4, l1), bias > 0.5 * sum_q


def _finite_blocks(x: Array) -> list[Moments]:
    """Blocks (the rows of x) whose elements are all finite."""
    n = x.shape[1]
    low, high = x.min(axis=1), x.max(axis=1)
    zeros = n - np.count_nonzero(x, axis=1)
    found = np.zeros((5, len(x)))  # mean, m2, m3, m4, l1
    found[0], found[4] = low, n * np.abs(low.astype(np.float64))
    varied = low != high
    if varied.any():
        found[:, varied] = _centre(x[varied], low[varied], high[varied])
    rows = zip(zeros, low, high, *found, strict=True)
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
    """A power of two by which to scale doubles whose fourth powers would leave their range; 0 for others."""
    if dtype not in _WIDE_RANGE or m.n == 0:
        return 0
    most = max(abs(m.min), abs(m.max))
    if not (most > 2.0**200 or 0 < most < 2.0**-180):
        return 0
    return -max(-1000, min(math.frexp(most)[1], 1000))


def finished(m: Moments, scaled: Moments, power: int) -> tuple[float, ...]:
    """The statistics: ends from the elements as they are, moments from the scaled ones."""
    if m.n == 0:
        return math.nan, math.nan, math.nan, math.nan, 0.0, 0.0, math.nan, math.nan, math.nan
    low, high, n, unscale = m.min + 0.0, m.max + 0.0, float(m.n), 2.0**-power
    mean = min(max(scaled.mean * unscale + 0.0, low), high)
    std, l1 = math.sqrt(scaled.m2 / n) * unscale, scaled.l1 * unscale
    l2 = math.sqrt(scaled.m2 + n * scaled.mean * scaled.mean)
    over = l2 * unscale == math.inf and l2 * _ALMOST * unscale < math.inf  # by rounding only
    norm = sys.float_info.max if over else l2 * unscale
    return low, high, mean, std, l1, norm, max(abs(low), abs(high)), *_shape(scaled)


def _shape(m: Moments) -> tuple[float, float]:
    """Skewness and kurtosis, which no scale changes; NaN when all elements are equal."""
    variance = m.m2 / m.n
    if not variance > 0:
        return math.nan, math.nan
    return m.m3 / m.m2 / math.sqrt(variance), max(m.m4 / m.m2 / variance, 1.0)
