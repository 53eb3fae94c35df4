"""The reduction written once for all graphs: against the few array operations that every framework has.

JAX, TensorFlow and PyTorch give their operations as an `Operations` object, call `reduce_in_graph` while the graph is
built (or on the device), and `row_from_graph` on the host with the numbers that came out. Counts, minimum and maximum
are exact; moments are taken in the type of `v` around the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tensortap.reduce.content_hash import ABSENT
from tensortap.reduce.numpy_moments import Moments, finished

COUNTS: Final = ("nan", "posinf", "neginf", "zeros", "finite")
MOMENTS: Final = ("min", "max", "mean", "m2", "l1", "skewness", "kurtosis")
"""What a graph gives for each tensor, in this order. `m2` is the sum of squared deviations from the mean."""
_TINY: Final = 1e-30  # instead of a zero to divide by


class Operations(Protocol):
    """A framework's operations on arrays of floats and of booleans."""

    def isnan(self, x: Any) -> Any:
        """Return where x is NaN."""

    def isfinite(self, x: Any) -> Any:
        """Return where x is neither NaN nor infinite."""

    def is_zero(self, x: Any) -> Any:
        """Return where x is zero, and not merely too small for a normal number."""

    def where(self, condition: Any, x: Any, otherwise: float) -> Any:
        """Return the elements of x, or a number."""

    def count(self, condition: Any) -> Any:
        """Return how many are true."""

    def as_float(self, count: Any, like: Any) -> Any:
        """Return a count in the type of `like`."""

    def sum(self, x: Any) -> Any:
        """Return the sum of all elements."""

    def sqrt(self, x: Any) -> Any:
        """Return the square root."""

    def min(self, x: Any) -> Any:
        """Return the smallest element."""

    def max(self, x: Any) -> Any:
        """Return the largest element."""

    def maximum(self, x: Any, least: float) -> Any:
        """Return x, but at least a number."""


class GraphValues(NamedTuple):
    """What a graph computes of one tensor, by the names of `COUNTS` and `MOMENTS`."""

    counts: list[Any]
    moments: list[Any]


Scale = Callable[[Any, Any, Any], Any]
"""Returns, from minimum, maximum and the number of finite elements, a power of two by which to multiply them."""


def reduce_in_graph(ops: Operations, v: Any, scale: Scale | None = None) -> GraphValues:
    """Return the counts and moments of the elements of `v`, a flat array of floats."""
    finite = ops.isfinite(v)
    number = ops.count(finite)
    low, high = ops.min(ops.where(finite, v, math.inf)), ops.max(ops.where(finite, v, -math.inf))
    u = ops.where(finite, v, 0.0)
    u = u if scale is None else u * scale(low, high, number)
    few = ops.maximum(ops.as_float(number, u), 1.0)
    near = ops.sum(u) / few
    d = ops.where(finite, u - near, 0.0)
    offset = ops.sum(d) / few  # what rounding left of the mean
    m2 = ops.maximum(ops.sum(d * d) - offset * (offset * few), 0.0)
    counts = [ops.isnan(v), v == math.inf, v == -math.inf, ops.is_zero(v)]
    z = ops.where(finite, (d - offset) / ops.maximum(ops.sqrt(m2 / few), _TINY), 0.0)
    square = z * z
    moments = [low, high, near + offset, m2, ops.sum(abs(u)), ops.sum(square * z) / few, ops.sum(square * square) / few]
    return GraphValues([*map(ops.count, counts), number], moments)


def row_from_graph(
    counts: Iterable[Any], moments: Iterable[Any], power: int = 0, content: int = ABSENT
) -> tuple[float, ...]:
    """Return a row of `statistics.ROW` from the numbers that a graph gave, scaled by two to the `power`."""
    nan, posinf, neginf, zeros, finite = map(int, counts)
    low, high, mean, m2, l1, skewness, kurtosis = map(float, moments)
    variance = m2 / max(finite, 1)
    m3, m4 = skewness * m2 * math.sqrt(variance), kurtosis * m2 * variance
    found = Moments(
        n=finite, nan=nan, posinf=posinf, neginf=neginf, zeros=zeros, min=low, max=high, mean=mean,
        m2=m2, m3=m3, m4=m4, l1=l1,
    )  # fmt: skip
    return (finite + nan + posinf + neginf, nan, posinf, neginf, zeros, *finished(found, found, power), content)


def merge_in_graph(ops: Operations, n: Any, parts: Sequence[Any]) -> list[Any]:
    """Return the moments of the whole, from those of pieces (arrays for `MOMENTS`) with `n` finite elements each."""
    low, high, mean, m2, l1, skewness, kurtosis = parts
    total = ops.maximum(ops.sum(n), 1.0)
    whole = ops.sum(mean * (n / total))
    apart = mean - whole
    square, each = apart * apart, m2 / ops.maximum(n, 1.0)
    m3, m4 = skewness * m2 * ops.sqrt(each), kurtosis * m2 * each
    second = ops.sum(m2 + n * square)
    third = ops.sum(m3 + 3 * apart * m2 + n * square * apart)
    fourth = ops.sum(m4 + 4 * apart * m3 + 6 * square * m2 + n * square * square)
    variance, least = ops.maximum(second / total, _TINY), ops.maximum(second, _TINY)
    shape = [third / least / ops.sqrt(variance), fourth / least / variance]
    return [ops.min(low), ops.max(high), whole, second, ops.sum(l1), *shape]
