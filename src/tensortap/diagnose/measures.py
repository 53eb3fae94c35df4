"""Compute what rules measure: distances between histograms, effective rank, entropy of attention."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.diagnose.history import SiteHistogram
from tensortap.reduce import histogram as buckets

Floats = npt.NDArray[np.float64]
_FLOOR: Final = 1e-4  # the share that replaces an empty bin's, so that one stray element gives no infinite distance


def shares(histogram: SiteHistogram) -> Floats:
    """Return the share of the finite elements in every bucket, from the smallest value to the largest."""
    dense = buckets.dense(histogram.offset, histogram.counts)
    ordered = np.concatenate([dense[1::2][::-1], [histogram.zeros], dense[0::2]]).astype(np.float64)
    return np.asarray(ordered / max(ordered.sum(), 1))


def ks(a: Floats, b: Floats) -> float:
    """Return the Kolmogorov–Smirnov distance between two distributions over the same ordered buckets.

    >>> ks(np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5]))
    0.5
    """
    return float(np.max(np.abs(np.cumsum(a) - np.cumsum(b)), initial=0.0))


def psi(expected: Floats, actual: Floats, bins: int = 10) -> float:
    """Return the population stability index over bins that hold equal shares of `expected`, as nearly as buckets allow.

    >>> round(psi(np.array([0.5, 0.5]), np.array([0.5, 0.5])), 6)
    0.0
    >>> round(psi(np.array([0.5, 0.5]), np.array([0.75, 0.25]), bins=2), 4)
    0.2747
    """
    e, a = (np.maximum(part, _FLOOR) for part in _binned(expected, actual, bins))
    return float(np.sum((a - e) * np.log(a / e)))


def _binned(expected: Floats, actual: Floats, bins: int) -> tuple[Floats, Floats]:
    """Return both summed over the same bins, each of which ends where another quantile of `expected` is reached."""
    before = np.cumsum(expected) - expected  # what lies below a bucket decides its bin, so a full bucket is one bin
    bin_of = np.minimum(np.floor(before * bins + 1e-9), bins - 1).astype(np.int64)
    e, a = (np.bincount(bin_of, part, bins).astype(np.float64) for part in (expected, actual))
    return e, a


def effective_rank(rows: npt.NDArray[Any]) -> float:
    """Return the exponential of the entropy of the singular values (Roy and Vetterli, 2007); 0 when all rows are equal.

    >>> round(effective_rank(np.eye(4)), 3), effective_rank(np.ones((4, 3)))
    (3.0, 0.0)
    """
    values = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    total = values.sum()
    if not total > 1e-7 * max(float(np.linalg.norm(rows)), 1e-300):
        return 0.0
    p = values[values > 0] / total
    return float(np.exp(-(p * np.log(p)).sum()))


def spread(rows: npt.NDArray[Any]) -> float:
    """Return how large the differences between rows are, relative to the rows; 0 when all are equal."""
    return float(np.linalg.norm(rows - rows.mean(axis=0)) / max(float(np.linalg.norm(rows)), 1e-300))


def attention_entropy(weights: npt.NDArray[Any]) -> Floats | None:
    """Return the mean entropy of each head's attention, relative to the maximum; None when this is not attention.

    >>> attention_entropy(np.full((1, 2, 4, 4), 0.25))
    array([1., 1.])

    Axes are (batch, head, query, key) or (batch, query, key). Where no query looks ahead the mask is taken for causal,
    and a query counts by the keys it may see.
    """
    p = np.asarray(weights, np.float64)
    if p.ndim not in (3, 4) or p.shape[-1] < 4 or not np.isfinite(p).all() or p.min() < 0:
        return None
    if not np.allclose(p.sum(-1), 1, atol=1e-2):
        return None
    p = p if p.ndim == 4 else p[:, None]
    queries, keys = p.shape[-2:]
    causal = queries == keys and not np.triu(p, 1).any()
    seen = np.arange(1, queries + 1) if causal else np.full(queries, keys)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)[..., seen > 1] / np.log(seen[seen > 1])
    each: Floats = entropy.mean(axis=(0, 2))
    return each
