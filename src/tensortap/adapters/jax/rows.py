"""Compute a tensor's row inside the step, so that a few numbers leave it instead of the tensor.

Counts, minimum and maximum are exact. Moments are taken in float32 (float64 where x64 is on), scaled by a power of two
that keeps squares in range, piece by piece so that rounding stays at a few units of the last digit.
"""

from __future__ import annotations

import os
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from tensortap.adapters.jax.hashing import hash_in_graph
from tensortap.reduce.content_hash import ABSENT, finished
from tensortap.reduce.graph_kernel import reduce_in_graph, row_from_graph
from tensortap.reduce.histogram import BUCKETS
from tensortap.reduce.numpy_kernel import trimmed
from tensortap.reduce.statistics import empty_row

VARIABLE: Final = "TENSORTAP_DEVICE_PATH"
# Where memory is the host's, the step calls the C kernel (kernel.py). "jax" has rows computed by XLA there too.
ON_HOST: Final = os.environ.get(VARIABLE, "") != "jax"
_PIECE: Final = 4096
_NO_BUCKET: Final = BUCKETS  # zeros and what is not finite


def row_of(value: Any, histogram: bool, hashed: bool) -> tuple[Any, ...]:
    """Return counts, ends and moments, the power of two that scales them, linear hash and histogram if wanted."""
    v = _real(value).reshape(-1)
    if not v.size:
        v = jnp.full(1, jnp.nan, v.dtype)  # its numbers are not read
    counts, moments, power = _moments(v)
    linear = hash_in_graph(value) if hashed else jnp.zeros(0, jnp.uint32)
    return (counts, moments, power, linear, _buckets(v)) if histogram else (counts, moments, power, linear)


def _real(value: Any) -> Any:
    """Return the elements as the widest floats there are; complex ones by their magnitude."""
    wide = jax.dtypes.canonicalize_dtype(np.float64)
    return (jnp.abs(value) if jnp.iscomplexobj(value) else value).astype(wide)


class _JaxGraphOperations:
    """JAX's operations, for the shared graph kernel."""

    isnan = staticmethod(jnp.isnan)
    isfinite = staticmethod(jnp.isfinite)
    where: Any = staticmethod(jnp.where)
    min = staticmethod(jnp.min)
    sqrt = staticmethod(jnp.sqrt)
    max = staticmethod(jnp.max)
    maximum = staticmethod(jnp.maximum)

    def is_zero(self, x: Any) -> Any:
        return _zero(x)

    def count(self, condition: Any) -> Any:
        return condition.sum(dtype=jnp.int32)

    def as_float(self, count: Any, like: Any) -> Any:
        return count.astype(like.dtype)

    def sum(self, x: Any) -> Any:
        return _sum(x)


def _moments(v: Any) -> tuple[Any, Any, Any]:
    power: list[Any] = []

    def scale(low: Any, high: Any, number: Any) -> Any:
        power.append(_power(jnp.where(number > 0, jnp.maximum(abs(low), abs(high)), 0)))
        return jnp.exp2(power[0].astype(v.dtype))

    counts, moments = reduce_in_graph(_JaxGraphOperations(), v, scale)
    return jnp.stack(counts), jnp.stack(moments), power[0]


def _zero(v: Any) -> Any:
    """Return which elements are zero, by their bits: a comparison takes the smallest floats for zeros."""
    whole, rest = (jnp.int64, 2**63 - 1) if v.dtype == jnp.float64 else (jnp.int32, 2**31 - 1)
    return (lax.bitcast_convert_type(v, whole) & rest) == 0


def _power(size: Any) -> Any:
    """Return a power of two that brings the largest magnitude near one, where its square would leave the range."""
    wide = size.dtype == jnp.float64
    large, small = (2.0**480, 2.0**-400) if wide else (2.0**40, 2.0**-40)
    exponent = jnp.frexp(size)[1]
    extreme = (size > large) | ((size < small) & (size > 0))
    return jnp.where(extreme, jnp.clip(-exponent, *((-1000, 1000) if wide else (-100, 100))), 0).astype(jnp.int32)


def _sum(v: Any) -> Any:
    """Sum piece by piece: one running sum of millions of floats would lose digits."""
    short = -v.size % _PIECE if v.size > _PIECE else 0
    return jnp.pad(v, (0, short)).reshape(-1, min(v.size, _PIECE)).sum(0).sum() if short or v.size > _PIECE else v.sum()


def _buckets(v: Any) -> Any:
    """Count the elements of every bucket of `reduce.histogram`; doubles are truncated by their bits, never rounded."""
    single = v if v.dtype == jnp.float32 else _cut(v)
    bits = lax.bitcast_convert_type(single, jnp.int32)
    bucket = ((bits >> 19) & 0xFFE) | ((bits >> 31) & 1)
    bucket = jnp.where(jnp.isfinite(v) & ~_zero(v), bucket, _NO_BUCKET)
    return jnp.zeros(BUCKETS + 1, jnp.int32).at[bucket].add(1)[:BUCKETS]


def _cut(v: Any) -> Any:
    single = v.astype(jnp.float32)
    over = abs(single.astype(v.dtype)) > abs(v)
    cut = jnp.where(over, jnp.nextafter(single, jnp.zeros_like(single)), single)
    tiny, largest = np.float32(1e-45), np.finfo(np.float32).max
    cut = jnp.where((cut == 0) & (v != 0), jnp.copysign(tiny, v).astype(jnp.float32), cut)
    return jnp.where(jnp.isinf(cut), jnp.copysign(largest, cut), cut)


def read(arrays: tuple[npt.NDArray[Any], ...], numel: int, nbytes: int) -> tuple[Any, int, Any]:
    """Return, on the host, a row as tables hold it, the offset and the counts of the histogram (None without one)."""
    if not numel:
        return empty_row(arrays[3].size > 0), 0, np.zeros(0, np.uint32) if len(arrays) > 4 else None
    counts, moments, power, linear = arrays[:4]
    content = finished(int(linear[0]) | int(linear[1]) << 32, nbytes) if linear.size else ABSENT
    row = row_from_graph(counts, moments, int(power), content)
    return row, *(trimmed(arrays[4]) if len(arrays) > 4 else (0, None))
