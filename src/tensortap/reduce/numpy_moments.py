"""The arithmetic of the NumPy kernel: moments of blocks, and how they become a row. The C kernel gives the same bits.

It follows csrc/ step by step, since equal results need equal roundings: blocks of 4096 elements, lanes that are
added in a fixed order, sums around a pivot of the chunk, Chan's formula between chunks and for blocks whose mean is far
from the pivot. Where the C code loops over elements, whole chunks are handled here by one NumPy call per step.
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
_LANES: Final = 8
_SAMPLE: Final = 64  # elements of a chunk by which its pivot is chosen
_ALMOST: Final = 1 - 2.0**-44  # one, but for what rounding may have added
_WIDE_RANGE: Final = (DTYPE_CODE["float64"], DTYPE_CODE["complex128"])


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
        """Add other moments by Chan's formula, in the same order of operations as `merge` in C."""
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


@dataclass(slots=True)
class _Block:
    """The result of reading a block: sums around the chunk's pivot, or the block's own moments if the pivot is far
    away.
    """

    n: int
    zeros: int
    min: float
    max: float
    sums: Array  # of d, d², d³, d⁴ (deviations from the pivot) and of magnitudes
    moments: Array | None = None  # mean, m2, m3, m4, l1

    def own_moments(self) -> Moments | None:
        counts = (self.n, 0, 0, 0, self.zeros, self.min, self.max)
        if self.min == self.max != 0:
            return Moments(*counts, self.min, 0.0, 0.0, 0.0, self.n * abs(self.min))
        return None if self.moments is None else Moments(*counts, *map(float, self.moments))


def _lane_sums(terms: Array) -> Array:
    """Return the sum of each row of the last axis: element i in lane i % 8, in order, then lanes folded."""
    short = -terms.shape[-1] % _LANES
    padded = np.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, short)]) if short else terms
    steps = padded.reshape(*terms.shape[:-1], -1, _LANES)
    lanes = np.zeros((*terms.shape[:-1], _LANES))
    for i in range(steps.shape[-2]):
        lanes += steps[..., i, :]
    while (half := lanes.shape[-1] // 2) >= 1:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _pivot(x: Array) -> float:
    """Return zero, or the mean of a chunk's first elements where it is far from zero."""
    if x.size < _SAMPLE:
        return 0.0
    first = x[:_SAMPLE].astype(np.float64)
    total, squares = map(float, _lane_sums(np.stack((first, first * first))))
    return total / _SAMPLE if total * total > 0.5 * _SAMPLE * squares else 0.0


def _sums(x: Array, pivot: Array | float) -> Array:
    d = x - pivot
    square = d * d
    return _lane_sums(np.stack((d, square, square * d, square * square, np.abs(x))))


def _central(sums: Array, n: int, pivot: Array | float) -> Array:
    """Return mean, m2, m3, m4 and l1 from sums around a pivot."""
    sum_d, sum_q, sum_c, sum_f, l1 = sums
    offset = sum_d / n
    bias = sum_d * offset
    m2 = sum_q - bias
    m3 = sum_c - 3 * offset * sum_q + 2 * offset * bias
    m4 = sum_f - 4 * offset * sum_c + 6 * offset * offset * sum_q - 3 * offset * offset * bias
    return np.stack((pivot + offset, np.where(m2 > 0, m2, 0.0), m3, m4, l1))


def _finite_blocks(x: Array, pivot: float) -> list[_Block]:
    """Return the sums or moments of blocks (the rows of x) whose elements are all finite."""
    n, wide = x.shape[1], x.astype(np.float64)
    low, high = wide.min(axis=1), wide.max(axis=1)
    zeros = n - np.count_nonzero(x, axis=1)
    sums = _sums(wide, pivot)
    far = np.flatnonzero(sums[0] * sums[0] > 0.8 * n * sums[1])
    rows = zip(zeros, low, high, sums.T, strict=True)
    blocks = [_Block(n, int(z), float(a), float(b), s) for z, a, b, s in rows]
    if far.size:
        own = np.clip(pivot + sums[0, far] / n, low[far], high[far])
        for i, moments in zip(far, _central(_sums(wide[far], own[:, None]), n, own).T, strict=True):
            blocks[i].moments = moments
    return blocks


def _any_block(x: Array, pivot: float, total: Moments) -> list[_Block]:
    """Return a block of its finite elements, if there are any; the others are counted in `total`."""
    finite = x[np.isfinite(x)]
    total.nan += int(np.count_nonzero(np.isnan(x)))
    total.posinf += int(np.count_nonzero(x == np.inf))
    total.neginf += int(np.count_nonzero(x == -np.inf))
    return _finite_blocks(finite[None], pivot) if finite.size else []


def _blocks(x: Array, pivot: float, total: Moments) -> Iterator[_Block]:
    full = x[: x.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    clean: Array = np.asarray(np.isfinite(full).all(axis=1))
    done = iter(_finite_blocks(full[clean], pivot) if clean.any() else ())
    for block, is_clean in zip(full, clean, strict=True):
        if is_clean:
            yield next(done)
        else:
            yield from _any_block(block, pivot, total)
    if x.size > full.size:
        yield from _any_block(x[full.size :], pivot, total)


def chunk_moments(x: Array) -> Moments:
    """Return a chunk's moments, from the sums of its blocks around one pivot and from blocks with their own moments."""
    pivot, total, together, sums = _pivot(x), Moments(), Moments(), np.zeros(5)
    for block in _blocks(x, pivot, total):
        own = block.own_moments()
        if own is not None:
            total.add(own)
            continue
        together.n += block.n
        together.zeros += block.zeros
        together.min, together.max = min(together.min, block.min), max(together.max, block.max)
        sums += block.sums
    if together.n:
        moments = _central(sums, together.n, pivot)
        together.mean, together.m2, together.m3, together.m4, together.l1 = map(float, moments)
        total.add(together)
    return total


def scale_power(dtype: int, m: Moments) -> int:
    """Return a power of two by which to scale doubles whose fourth powers would leave their range; 0 for others."""
    if dtype not in _WIDE_RANGE or m.n == 0:
        return 0
    most = max(abs(m.min), abs(m.max))
    if not (most > 2.0**200 or 0 < most < 2.0**-180):
        return 0
    return -max(-1000, min(math.frexp(most)[1], 1000))


def finished(m: Moments, scaled: Moments, power: int) -> tuple[float, ...]:
    """Return the statistics: ends from the elements as they are, moments from the scaled ones."""
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
    """Return skewness and kurtosis, which no scale changes; NaN when all elements are equal."""
    variance = m.m2 / m.n
    if not variance > 0:
        return math.nan, math.nan
    return m.m3 / m.m2 / math.sqrt(variance), max(m.m4 / m.m2 / variance, 1.0)
