"""The statistics of one tensor: the public form of a kernel row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap import markup, text
from tensortap.reduce import histogram as buckets
from tensortap.reduce import kernel as kernels
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.content_hash import ABSENT
from tensortap.reduce.statistics import FIELDS, ROW, RowValues
from tensortap.types import DTYPES

_SHORT = {d.name: d.short for d in DTYPES}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Summary(RowValues, Mapping[str, Any]):
    """The statistics of one tensor: counts over all elements, the others over the finite ones.

    >>> s = summarize([1.0, 2.0, 3.0, float("nan")])
    >>> s.nan, s["mean"], s.quantile(1.0)
    (1, 2.0, 3.0)

    `min`, `max`, `mean` and `std` are NaN when no element is finite; `std` is the population's.
    """

    dtype: str
    shape: tuple[int, ...]
    hist_offset: int | None = None
    hist_counts: npt.NDArray[Any] | None = None

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)

    @property
    def finite(self) -> int:
        """How many elements are neither NaN nor infinite."""
        return self.numel - self.nan - self.posinf - self.neginf

    def quantile(self, q: float) -> float:
        """Return the value below which a share `q` of the finite elements lies, derived from the histogram.

        Exact at 0 and 1; between them the relative error is at most `buckets.RELATIVE_ERROR`. NaN when the
        histogram was not kept or nothing is finite.
        """
        if self.hist_counts is None or self.hist_offset is None:
            return float("nan")
        return float(
            buckets.quantile(q, self.hist_offset, self.hist_counts, self.zeros, minimum=self.min, maximum=self.max)
        )

    def heights(self, width: int) -> list[float]:
        """Return the histogram in equal steps between minimum and maximum; empty when it was not kept."""
        if self.hist_counts is None or self.hist_offset is None or not self.finite:
            return []
        counts = buckets.rebin(self.hist_offset, self.hist_counts, self.zeros, self.min, self.max, width)
        return [float(count) for count in counts]

    def bars(self, width: int = 8) -> str:
        """Return the histogram as one short line of bars."""
        return text.bars(self.heights(width))

    def __str__(self) -> str:
        return describe(self)

    def _repr_html_(self) -> str:
        return markup.page(*_lines(self))


def fields_of(row: Iterable[Any]) -> dict[str, Any]:
    """Return the statistics of a row by name; a hash that was not asked for is None."""
    known = dict(zip(FIELDS, row, strict=True))
    return known | {"hash": None if known["hash"] == ABSENT else known["hash"]}


_NAMES = ("dtype", "shape", *FIELDS, "hist_offset", "hist_counts")


def describe(summary: Summary) -> str:
    """Return the one-line form: `[8,128,256] f32 mean 0.013 std 1.02 min −4.1 max 4.4 zeros 0.1% nan 0 ▁▂▅█▅▂▁`."""
    moments = " ".join(f"{name} {text.number(summary[name])}" for name in ("mean", "std", "min", "max"))
    tail = f"zeros {text.percent(summary.zeros, summary.numel)} nan {summary.nan}"
    if infinite := summary.posinf + summary.neginf:
        tail += f" inf {infinite}"
    return f"{head(summary)} {moments} {tail} {summary.bars()}".rstrip()


def head(summary: Summary) -> str:
    """Return shape and type: `[8,128,256] f32`."""
    return f"{text.shape(summary.shape)} {_SHORT.get(summary.dtype, summary.dtype)}"


def trouble(summary: Summary) -> str:
    """Return how many elements are NaN or infinite, and how large a share; empty when none is.

    >>> trouble(summarize([1.0, float("nan"), float("inf"), 2.0]))
    'NaN 1 (25%), +inf 1 (25%)'
    """
    counts = (("NaN", summary.nan), ("+inf", summary.posinf), ("−inf", summary.neginf))
    return ", ".join(f"{name} {count} ({text.percent(count, summary.numel)})" for name, count in counts if count)


def _lines(summary: Summary) -> list[str]:
    """Return the HTML of a tensor for notebooks: problems first."""
    bad = trouble(summary)
    low, high, mean, std = (text.number(summary[name]) for name in ("min", "max", "mean", "std"))
    drawn = markup.bars(summary.heights(32), 192, 28, "histogram")
    said = f"mean {mean} ± {std} · zeros {text.percent(summary.zeros, summary.numel)}"
    return [
        markup.line(head(summary)),
        *([markup.line(bad, colour=markup.ALARM)] if bad else []),
        *([markup.line(f"{low} ", drawn, f" {high}"), markup.line(said)] if summary.finite else []),
    ]


def summarize(value: Any, *, histogram: bool = True, hash: bool = False) -> Summary:
    """Return the statistics and histogram of any array, tensor, list or number, in one pass over its memory.

    >>> print(summarize(np.arange(8, dtype=np.float32)))
    [8] f32 mean 3.5 std 2.29 min 0 max 7 zeros 12.5% nan 0 ▅▅▅▅▄▄▄█

    Works for NumPy, PyTorch, TensorFlow and JAX values; complex numbers are taken by magnitude, quantised and
    sparse tensors by their values. `hash=True` adds the content hash, which tells apart what differs in any bit.
    """
    buffer = buffer_of(value)
    row = np.zeros(1, ROW)
    counts = np.empty(buckets.BUCKETS if histogram else 0, np.uint32)
    offset, length = kernels.reduce(
        row.ctypes.data,
        counts.ctypes.data if histogram else 0,
        buffer.address,
        buffer.dtype,
        buffer.shape,
        buffer.strides,
        hash,
    )
    return Summary(
        dtype=DTYPES[buffer.dtype].name,
        shape=buffer.shape,
        **fields_of(row[0].item()),
        hist_offset=offset if length >= 0 else None,
        hist_counts=counts[:length].copy() if length >= 0 else None,
    )
