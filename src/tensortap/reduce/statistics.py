"""The registry of statistics: the values of every recorded tensor, in the order of a row.

The row's layout, the Arrow and Parquet schema, nulls, `Summary`, merging, the viewer's list and the table in
docs/run-folder.md come from here or are checked against it by tests/reduce/test_statistics.py. A statistic's arithmetic
is in csrc/ (C), numpy_moments.py (the same in NumPy) and graph_kernel.py (inside the graphs of frameworks).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.reduce.content_hash import ABSENT

Array = npt.NDArray[Any]
Merge = Literal["sum", "min", "max", "norm", "moment", "none"]
Defined = Literal["always", "finite", "spread", "hashed"]
Scale = Literal["linear", "log"]
Bound = Literal["moment", "extreme", "sum", "norm"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowValues:
    """The values of one row by name: the fields of the registry."""

    numel: int
    nan: int
    posinf: int
    neginf: int
    zeros: int
    min: float
    max: float
    mean: float
    std: float
    l1: float
    l2: float
    absmax: float
    skewness: float
    kurtosis: float
    hash: int | None = None


class Statistic(NamedTuple):
    """One statistic.

    `merge` says how two rows become one: `norm` adds the squares, `moment` uses Chan's formula (merge.py), `none` gives
    no value, since the order of the rows is not known. `defined` says when there is a value; otherwise it is NaN in
    memory (of a hash `ABSENT`) and null in files. `finite` needs a finite element, `spread` two that differ, `hashed`
    that it was asked for. A `standardized` statistic stays as it is when all elements are multiplied by one positive
    number; the others of type float64 are multiplied with them. `scale` is how a heat map draws it; None leaves it out
    of the viewer's list. `bound` says how far it can move when every element moves within a tolerance, so that two runs
    can be compared by it (diff/metrics.py); None leaves it out of comparisons. `derive` gives the column of runs that
    were written before the statistic existed, from the columns `sources`; without it their column is null.
    """

    name: str
    dtype: type[np.int64] | type[np.float64]
    merge: Merge
    defined: Defined
    label: str
    meaning: str
    unit: str = ""
    scale: Scale | None = None
    bound: Bound | None = None
    standardized: bool = False
    derive: Callable[[Mapping[str, Array]], Array] | None = None
    sources: tuple[str, ...] = ()

    @property
    def slot(self) -> int:
        """Its place among the eight-byte values of a row, in C too."""
        return REGISTRY.index(self)

    @property
    def is_count(self) -> bool:
        """Whether it is a whole number of elements."""
        return self.dtype is np.int64 and self.merge == "sum"


_I, _F = np.int64, np.float64
REGISTRY: Final = (
    Statistic("numel", _I, "sum", "always", "elements", "how many elements it has", unit="elements", scale="log"),
    Statistic("nan", _I, "sum", "always", "NaN (count)", "how many of them are NaN", unit="elements"),
    Statistic("posinf", _I, "sum", "always", "+Inf (count)", "how many are +Inf", unit="elements"),
    Statistic("neginf", _I, "sum", "always", "−Inf (count)", "how many are −Inf", unit="elements"),
    Statistic("zeros", _I, "sum", "always", "zeros (count)", "how many are zero, −0.0 included", unit="elements"),
    Statistic("min", _F, "min", "finite", "least", "the smallest finite element", scale="linear",
              bound="extreme"),
    Statistic("max", _F, "max", "finite", "greatest", "the largest finite element", scale="linear",
              bound="extreme"),
    Statistic("mean", _F, "moment", "finite", "mean", "the mean of the finite elements", scale="linear",
              bound="moment"),
    Statistic("std", _F, "moment", "finite", "standard deviation",
              "their standard deviation (the population's)", scale="log", bound="moment"),
    Statistic("l1", _F, "sum", "always", "L1 norm", "the sum of their magnitudes", bound="sum"),
    Statistic("l2", _F, "norm", "always", "L2 norm", "the root of the sum of their squares", scale="log", bound="norm"),
    Statistic("absmax", _F, "max", "finite", "greatest magnitude", "the largest magnitude of a finite element",
              scale="log", sources=("min", "max"),
              derive=lambda columns: np.fmax(np.abs(columns["min"]), np.abs(columns["max"]))),
    Statistic("skewness", _F, "moment", "spread", "skewness",
              "their third standardized moment", scale="linear", standardized=True),
    Statistic("kurtosis", _F, "moment", "spread", "kurtosis",
              "their fourth standardized moment, 3 for a normal distribution", scale="log",
              standardized=True),
    Statistic("hash", _I, "none", "hashed", "content hash",
              "the content hash: CRC-64/XZ of all elements' bytes in C order, as a signed number"),
)  # fmt: skip

BY_NAME: Final[Mapping[str, Statistic]] = {statistic.name: statistic for statistic in REGISTRY}
FIELDS: Final = tuple(BY_NAME)
"""The names of all statistics, in the order of a row."""
NUMBERS: Final = tuple(s.name for s in REGISTRY if s.merge != "none")
"""Those that are numbers: they can be drawn, compared and merged."""
COUNTS: Final = tuple(s.name for s in REGISTRY if s.is_count and s.name != "numel")
STATISTICS: Final = tuple(s.name for s in REGISTRY if s.dtype is np.float64)
SCALED: Final = tuple(s.name for s in REGISTRY if s.dtype is np.float64 and not s.standardized)
"""Those that are multiplied by a positive number when all elements are."""
BOUNDED: Final = tuple(s.name for s in REGISTRY if s.bound is not None)
"""Those that tensors are compared by: see `Statistic.bound`."""
NONFINITE: Final = ("nan", "posinf", "neginf")
CONDITIONS: Final[tuple[Defined, ...]] = tuple(dict.fromkeys(s.defined for s in REGISTRY if s.defined != "always"))
"""The conditions under which some statistics have no value. A table keeps a bitmap for each."""

ROW: Final = np.dtype([(statistic.name, statistic.dtype) for statistic in REGISTRY])
"""One reduction, as the kernels write it."""

COLUMNS: Final = (
    "step", "phase", "rank", "site", "port", "slot", "call", "seq", "op", "dtype", "shape",
    *FIELDS,
    "hist_offset", "hist_counts", "reason", "recomputed", "time",
)  # fmt: skip
"""The columns of one record, in order: a contract with everyone who reads a run."""


def defined_rows(condition: Defined, rows: Any) -> Array:
    """Return which of `rows` (by name) have values for the statistics of a condition: the others hold NaN.

    >>> defined_rows("finite", {"min": np.array([1.0, np.nan])}).tolist()
    [True, False]
    """
    example = next(statistic.name for statistic in REGISTRY if statistic.defined == condition)
    values = rows[example]
    present: Array = values != ABSENT if BY_NAME[example].dtype is np.int64 else ~np.isnan(values)
    return present


def with_sources(columns: Iterable[str]) -> list[str]:
    """Return the columns, and those from which they are derived where an older run lacks them."""
    names = list(columns)
    return list(
        dict.fromkeys([*names, *(source for name in names if name in BY_NAME for source in BY_NAME[name].sources)])
    )


def row_without_values(numel: int) -> tuple[float, ...]:
    """Return the row of a tensor that has a shape but no values: no counts, and everything else undefined."""
    return (numel, *(0 if s.is_count else _undefined(s) for s in REGISTRY[1:]))


def _undefined(statistic: Statistic) -> float:
    return ABSENT if statistic.dtype is np.int64 else math.nan


def empty_row(hashed: bool) -> tuple[float, ...]:
    """Return the row of a tensor without elements, with a hash where it was asked for."""
    return (*EMPTY_ROW[:-1], 0) if hashed else EMPTY_ROW


EMPTY_ROW: Final = tuple(0 if s.is_count else 0.0 if s.defined == "always" else _undefined(s) for s in REGISTRY)
"""The row of a tensor without elements."""
