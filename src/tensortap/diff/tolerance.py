"""Say how far two runs may differ: as far as rounding in the coarser of two types explains.

An element may differ by `atol + rtol * (|x| + rms)`, where `x` is the element and `rms` the root mean square of its
tensor, both of the first run. By default `atol` is 0 and `rtol` is the type's epsilon times a growth factor: rounding
errors of a layer's many additions add up, and those of earlier layers are carried along. Where a good part of the
sites have another type in the other run, the coarser type of a pair counts; where only a few have, that is a
difference to be found and not a change of precision, and the finer one counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    "bfloat16": (2.0**-7, 16),
    "float8_e4m3fn": (2.0**-3, 2),
    "float8_e4m3fnuz": (2.0**-3, 2),
    "float8_e5m2": (2.0**-2, 2),
    "float8_e5m2fnuz": (2.0**-2, 2),
}
SYSTEMATIC: Final = 0.25  # the share of sites with another type from which on it is a change of precision
RTOL: Final = {d.name: math.prod(_ROUNDING.get(d.name, (0.0, 1))) for d in DTYPES}


class Tolerance(NamedTuple):
    """The bound for one pair."""

    rtol: float
    atol: float

    def allowed(self, scale: float) -> float:
        """Return how far apart two numbers of this scale may be."""
        return self.atol + self.rtol * scale


class Precision:
    """Give the tolerance of each pair in order of execution: rounding in one tensor affects all that follow.

    `changed` says that the second run is of another precision as a whole.

    >>> walk = Precision()
    >>> [walk.tolerance(dtype, dtype).rtol for dtype in ("float32", "bfloat16", "float32", "int64")]
    [1.52587890625e-05, 0.125, 0.125, 0.0]
    """

    def __init__(self, rtol: float | None = None, atol: float | None = None, *, changed: bool = False) -> None:
        for name, value in (("rtol", rtol), ("atol", atol)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ProbeError(f"{name} must be a number from 0 up, such as {name}=1e-4, got {value!r}")
        self._which = max if changed else _finer
        self._rtol = rtol
        self._atol = atol or 0.0
        self._coarsest = 0.0
        self._before_step = 0.0

    def own(self, dtype_a: str, dtype_b: str) -> float:
        """Return the relative tolerance of two types by themselves; an unknown type has none."""
        return self._which(RTOL.get(dtype_a, 0.0), RTOL.get(dtype_b, 0.0))

    @property
    def given(self) -> tuple[float | None, float]:
        """The tolerance that replaces that of the types: relative, None when it was not given, and absolute."""
        return self._rtol, self._atol

    def next_step(self) -> None:
        """Begin the next step."""
        self._before_step = self._coarsest

    def tolerance(self, dtype_a: str, dtype_b: str, port: str = "output") -> Tolerance:
        """Return the tolerance of the next pair. A parameter was computed in earlier steps, all else in this one."""
        own = self.own(dtype_a, dtype_b)
        so_far = self._before_step if port == "param" else self._coarsest
        self._coarsest = max(self._coarsest, own)
        if not own:  # integers are exact, whatever they were computed from
            return Tolerance(self._rtol or 0.0, self._atol)
        return Tolerance(max(own, so_far) if self._rtol is None else self._rtol, self._atol)


def _finer(a: float, b: float) -> float:
    """Return the smaller; an integer beside a float is as coarse as the float."""
    return min(a, b) or max(a, b)


def changed(dtypes: Iterable[tuple[str, str]]) -> bool:
    """Return whether pairs of types say that the second run is of another precision.

    >>> changed([("float32", "bfloat16"), ("float32", "float32"), ("int64", "int64")])
    True
    """
    floats = [(a, b) for a, b in dtypes if RTOL.get(a) or RTOL.get(b)]
    return sum(a != b for a, b in floats) >= SYSTEMATIC * max(len(floats), 1)
