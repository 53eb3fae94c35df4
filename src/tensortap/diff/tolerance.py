"""How far two runs may be apart: what rounding in the coarser of two types explains.

An element may differ by `atol + rtol * (|x| + rms)`, where `x` is the element and `rms` the root mean square of its
tensor, both of the first run. By default `atol` is 0 and `rtol` is the type's epsilon times a growth factor: rounding
errors of a layer's many additions add up, and those of earlier layers are carried along.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from tensortap.errors import ProbeError
from tensortap.types import DTYPES

# epsilon of the type, and how often it may be exceeded; measured on transformers of 12 layers, see docs/diff.md
_ROUNDING: Final = {
    "float64": (2.0**-52, 128),
    "complex128": (2.0**-52, 128),
    "float32": (2.0**-23, 128),
    "complex64": (2.0**-23, 128),
    "float16": (2.0**-10, 16),
    "bfloat16": (2.0**-7, 8),
    "float8_e4m3fn": (2.0**-3, 2),
    "float8_e4m3fnuz": (2.0**-3, 2),
    "float8_e5m2": (2.0**-2, 2),
    "float8_e5m2fnuz": (2.0**-2, 2),
}
RTOL: Final = {d.name: math.prod(_ROUNDING.get(d.name, (0.0, 1))) for d in DTYPES}


class Tolerance(NamedTuple):
    """The bound for one pair."""

    rtol: float
    atol: float

    def allowed(self, scale: float) -> float:
        """How far apart two numbers of this scale may be."""
        return self.atol + self.rtol * scale


class Precision:
    """Walks through a run in order of execution and says what tolerance is due: rounding once done stays done.

    >>> walk = Precision()
    >>> [walk.tolerance(dtype, dtype).rtol for dtype in ("float32", "bfloat16", "float32", "int64")]
    [1.52587890625e-05, 0.0625, 0.0625, 0.0]
    """

    def __init__(self, rtol: float | None = None, atol: float | None = None) -> None:
        for name, value in (("rtol", rtol), ("atol", atol)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ProbeError(f"{name}={value!r} is no tolerance; give a number from 0 up, such as {name}=1e-4")
        self._rtol = rtol
        self._atol = atol or 0.0
        self._coarsest = 0.0
        self._before_step = 0.0

    def next_step(self) -> None:
        """A step begins."""
        self._before_step = self._coarsest

    def tolerance(self, dtype_a: str, dtype_b: str, port: str = "output") -> Tolerance:
        """The tolerance of the next pair. A parameter was computed in earlier steps, everything else in this one too."""
        own = max(RTOL[dtype_a], RTOL[dtype_b])
        so_far = self._before_step if port == "param" else self._coarsest
        self._coarsest = max(self._coarsest, own)
        if not own:  # integers are exact, whatever they were computed from
            return Tolerance(self._rtol or 0.0, self._atol)
        return Tolerance(max(own, so_far) if self._rtol is None else self._rtol, self._atol)
