"""Arrays of every kind, and what their rows must be."""

from __future__ import annotations

import ml_dtypes
import numpy as np

RNG = np.random.default_rng(0)
ARRAYS = {
    "normal": RNG.normal(size=(300, 37)).astype(np.float32),
    "far from zero": (RNG.normal(size=5000) + 1e4).astype(np.float32),
    "large": (RNG.normal(size=30) * 1e37).astype(np.float32),
    "small": (RNG.normal(size=30) * 1e-35).astype(np.float32),
    "not finite": np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1, np.nan], np.float32),
    "only nan": np.full(3, np.nan, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(2.5).reshape(()),
    "bfloat16": RNG.normal(size=(8, 9)).astype(ml_dtypes.bfloat16),
    "float16": RNG.normal(size=(8, 9)).astype(np.float16),
    "integers": RNG.integers(-50, 50, (4, 5)).astype(np.int32),
    "flags": np.array([True, False, True]),
    "complex": (RNG.normal(size=9) + 1j * RNG.normal(size=9)).astype(np.complex64),
}

STATISTICS = ("numel", "nan", "posinf", "neginf", "zeros", "min", "max", "mean", "std", "l1", "l2")


def assert_same_row(record, expected) -> None:
    """Bit for bit, with type, shape and histogram."""
    for name in STATISTICS:
        assert np.array_equal(record[name], expected[name], equal_nan=True), name
    assert (record["dtype"], record["shape"]) == (expected["dtype"], expected["shape"])
    assert record["hist_offset"] == expected["hist_offset"]
    assert np.array_equal(record["hist_counts"], expected["hist_counts"])
