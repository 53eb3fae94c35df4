"""How close results must be: the same bits where nothing was compiled anew, to rounding where something was.

A traced function with taps is another program to TensorFlow's graph optimizer and to XLA. They may fuse and order its
operations otherwise, on one CPU and not on the next, so equal bits there would be chance.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

RTOL: Final = 1e-5
ATOL: Final = 1e-6


def assert_same_to_rounding(expected: Any, found: Any) -> None:
    """Compare lists of arrays, or two arrays, of programs that were compiled apart, to rounding of float32."""
    pairs = zip(expected, found, strict=True) if isinstance(expected, (list, tuple)) else [(expected, found)]
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=RTOL, atol=ATOL)
