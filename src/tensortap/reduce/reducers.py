"""Reducers: keep statistics, a histogram, quantiles, some or all elements, or numbers for each unit or sample."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from tensortap.errors import ProbeError

Array = npt.NDArray[Any]


@runtime_checkable
class Keeper(Protocol):
    """A reducer that keeps elements themselves: it copies what it wants out of a view it must not change."""

    @property
    def kind(self) -> str:
        """The name under which `run.tensor(..., kind=)` finds what was kept."""

    def pick(self, array: Array, place: str) -> Array | None:
        """Return the elements to keep as an array of their own, or None when this tensor has none of them."""


class _Described:
    __slots__ = ()

    @property
    def kind(self) -> str:
        """The name of the reducer in `run.json`, and of what it keeps in `run.tensor(..., kind=)`."""
        return type(self).__name__.lower()

    def describe(self) -> dict[str, Any]:
        """Return the reducer and its arguments as plain data, for `run.json`."""
        arguments = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
        return {"kind": self.kind, **plain}


@dataclass(frozen=True, slots=True)
class Stats(_Described):
    """Counts and moments. Every recorded tensor has them; this says that nothing else is wanted."""


@dataclass(frozen=True, slots=True)
class Histogram(_Described):
    """The complete float-bit histogram."""


@dataclass(frozen=True, slots=True)
class Hash(_Described):
    """The content hash."""


@dataclass(frozen=True, slots=True)
class Quantiles(_Described):
    """Chosen quantiles, derived from the histogram and written beside the statistics."""

    at: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sample(_Described):
    """`n` elements at positions that depend only on seed, place and shape, so that steps and runs can be compared."""

    n: int
    seed: int = 0

    @property
    def kind(self) -> str:  # noqa: D102
        return "sample"

    def pick(self, array: Array, place: str) -> Array:  # noqa: D102
        indices = sample_indices(self.n, self.seed, place, array.shape)
        return array[np.unravel_index(indices, array.shape)] if array.ndim else array.reshape(1).copy()


@dataclass(frozen=True, slots=True)
class Rows(_Described):
    """Chosen samples of the batch: entries along the first axis."""

    indices: tuple[int, ...]

    @property
    def kind(self) -> str:  # noqa: D102
        return "rows"

    def pick(self, array: Array, place: str) -> Array | None:  # noqa: D102
        there = self.there(array.shape)
        return array[there] if there else None

    def there(self, shape: Sequence[int]) -> list[int]:
        """Return those of the positions that a tensor of this shape has."""
        return [i for i in self.indices if shape and -shape[0] <= i < shape[0]]


@dataclass(frozen=True, slots=True)
class Full(_Described):
    """The whole tensor."""

    @property
    def kind(self) -> str:  # noqa: D102
        return "full"

    def pick(self, array: Array, place: str) -> Array:  # noqa: D102
        return np.array(array, order="C", copy=True)


@dataclass(frozen=True, slots=True)
class Units(_Described):
    """The activity of each unit: the share of its elements that are not zero, and their mean magnitude.

    >>> units().pick(np.array([[0.0, 2.0], [0.0, 4.0]]), "fc:output")
    array([[0., 1.],
           [0., 3.]], dtype=float32)
    """

    @property
    def kind(self) -> str:  # noqa: D102
        return "units"

    def pick(self, array: Array, place: str) -> Array | None:  # noqa: D102
        if not array.ndim or not array.size:
            return None
        axis = 1 if array.ndim in (4, 5) else array.ndim - 1  # images have channels, everything else has features
        others = tuple(i for i in range(array.ndim) if i != axis)
        if array.dtype.kind not in "fc" or array.dtype.itemsize < 4:
            array = array.astype(np.float32)  # no |-128| in int8, no sums in half precision
        each = array.size // array.shape[axis]
        with np.errstate(over="ignore", invalid="ignore"):
            size = np.abs(array).sum(axis=others, dtype=np.float64) / each
            return np.stack([np.count_nonzero(array, axis=others) / each, size]).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PerSample(_Described):
    """Each sample of the batch in three numbers: elements that are not finite, RMS of the others, their largest |x|.

    >>> per_sample().pick(np.array([[3.0, 3.0], [np.nan, -2.0]]), "fc:output")
    array([[0., 1.],
           [3., 2.],
           [3., 2.]], dtype=float32)
    """

    axis: int = 0

    @property
    def kind(self) -> str:  # noqa: D102
        return "per_sample"

    def pick(self, array: Array, place: str) -> Array | None:  # noqa: D102
        if array.ndim <= self.axis or not array.size:
            return None
        rows = np.moveaxis(array, self.axis, 0).reshape(array.shape[self.axis], -1)
        size = np.abs(rows.astype(np.complex128 if rows.dtype.kind == "c" else np.float64))
        finite = np.isfinite(size)
        size = np.where(finite, size, 0.0)
        count = np.maximum(finite.sum(1), 1)
        # Divided by the largest before squaring, so that no square leaves the range.
        most = size.max(1)
        scale = np.where(most > 0, most, 1.0)
        rms = scale * np.sqrt(((size / scale[:, None]) ** 2).sum(1) / count)
        with np.errstate(over="ignore"):
            return np.stack([(~finite).sum(1), rms, most]).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Custom(_Described):
    """A function of the user's: tensor in; a number, a dict of numbers or a small array out."""

    function: Callable[[Any], Any]
    name: str

    def describe(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": "custom", "name": self.name}


Reducer = Stats | Histogram | Hash | Quantiles | Sample | Rows | Full | Units | PerSample | Custom


def stats() -> Stats:
    """Keep count, NaN, ±Inf, zeros, min, max, mean, std, L1 and L2."""
    return Stats()


def histogram() -> Histogram:
    """Keep the complete histogram, from which quantiles can be derived later."""
    return Histogram()


def content_hash() -> Hash:
    """Keep 64 bits that tell whether two tensors are equal to the last bit, whatever their strides."""
    return Hash()


def quantiles(*at: float) -> Quantiles:
    """Keep quantiles, e.g. `quantiles(0.05, 0.5, 0.95)`; approximate to 1/8 of the value at worst, exact at 0 and 1."""
    bad = [q for q in at if not 0 <= q <= 1]
    if bad or not at:
        raise ProbeError(f"quantiles must be between 0 and 1, got {bad or 'none'}; write quantiles(0.05, 0.5, 0.95)")
    return Quantiles(tuple(float(q) for q in at))


def sample(n: int, seed: int = 0) -> Sample:
    """Keep `n` elements, at the same positions in every step and run with this seed, place and shape."""
    if n < 1:
        raise ProbeError(f"n of sample(n) must be at least 1, got {n!r}; write sample(256)")
    return Sample(int(n), int(seed))


def rows(indices: Iterable[int]) -> Rows:
    """Keep chosen samples of the batch, e.g. `rows([0, 2])`. Those a smaller batch lacks are left out."""
    try:
        chosen = tuple(int(i) for i in indices)
    except TypeError:
        raise ProbeError(f"rows() must be given a list of positions, got {indices!r}; write rows([0, 2])") from None
    if not chosen:
        raise ProbeError("rows() must be given at least one position, got []; write rows([0, 2])")
    return Rows(chosen)


def full() -> Full:
    """Keep the whole tensor. It is copied when seen, so later in-place changes do not reach it."""
    return Full()


def units() -> Units:
    """Keep for each unit the share of elements that are not zero and the mean magnitude, as an array (2, units).

    Units are the channels (axis 1) of tensors with four or five axes, otherwise the entries of the last axis.
    """
    return Units()


def per_sample(axis: int = 0) -> PerSample:
    """Keep for each sample how many elements are not finite, the RMS of the others and their largest magnitude.

    The result is an array (3, samples). Samples lie along `axis`; a tensor without it is left out.
    """
    if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
        raise ProbeError(f"axis of per_sample() must be 0 or more, got {axis!r}; write per_sample(axis=0)")
    return PerSample(axis)


def as_reducers(keep: Any) -> tuple[Reducer, ...]:
    """Return the `keep=` argument of a probe as reducers: one or several, functions among them."""
    if keep is None:
        return (Stats(), Histogram())
    items = keep if isinstance(keep, (list, tuple)) else [keep]
    return tuple(_as_reducer(item) for item in items)


def _as_reducer(item: Any) -> Reducer:
    if isinstance(item, Reducer):
        return item
    if item in _FACTORIES:
        raise ProbeError(
            f"keep={_FACTORIES[item].partition('(')[0]} is the function itself; call it: keep={_FACTORIES[item]}"
        )
    if callable(item):
        return Custom(item, getattr(item, "__name__", type(item).__name__))
    raise ProbeError(
        f"keep= must be stats(), histogram(), content_hash(), quantiles(...), sample(n), rows([...]), full(), units(), "
        f"per_sample(), a function of the tensor, or a list of these, got {item!r}"
    )


_FACTORIES: dict[Any, str] = {
    stats: "stats()",
    histogram: "histogram()",
    content_hash: "content_hash()",
    quantiles: "quantiles(0.05, 0.5, 0.95)",
    sample: "sample(256)",
    rows: "rows([0, 2])",
    full: "full()",
    units: "units()",
    per_sample: "per_sample()",
}


@functools.lru_cache(maxsize=4096)
def sample_indices(n: int, seed: int, place: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the sorted flat positions that `sample(n, seed)` takes at a place: the same on every machine and version.

    >>> sample_indices(3, 0, "fc:output", (4, 5)).tolist() == sample_indices(3, 0, "fc:output", (4, 5)).tolist()
    True
    """
    numel = int(np.prod(shape, dtype=np.int64))
    if n >= numel:
        return np.arange(numel)
    digest = hashlib.blake2b(f"{seed}|{place}|{shape}".encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little")
    chosen = np.empty(0, np.int64)
    drawn = 0
    while len(chosen) < n:
        more = _positions(start, drawn, 2 * n, numel)
        drawn += 2 * n
        merged = np.concatenate([chosen, more])
        _, first = np.unique(merged, return_index=True)
        chosen = merged[np.sort(first)]
    indices = np.sort(chosen[:n])
    indices.flags.writeable = False
    return indices


def _positions(start: int, skip: int, count: int, numel: int) -> npt.NDArray[np.int64]:
    """Return positions by SplitMix64, which, unlike NumPy's generators, will never change its stream."""
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(skip + 1, skip + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z % np.uint64(numel)).astype(np.int64)


_PLAIN: Final[dict[str, Callable[[], Reducer]]] = {
    "stats": stats,
    "histogram": histogram,
    "hash": content_hash,
    "full": full,
    "per_sample": per_sample,
}
_NAMES: Final = "stats, histogram, hash, full, per_sample, sample:256, rows:0,2 and quantiles:0.05,0.5,0.95"


def parse_reducer(text: str) -> Reducer:
    """Return the reducer that a text names, as in the option `--keep`.

    >>> parse_reducer("sample:64"), parse_reducer("rows:0,2")
    (Sample(n=64, seed=0), Rows(indices=(0, 2)))
    """
    kind, _, rest = text.partition(":")
    try:
        if kind in _PLAIN and not rest:
            return _PLAIN[kind]()
        if kind == "sample":
            return sample(int(rest))
        if kind == "rows":
            return rows([int(i) for i in rest.split(",")])
        if kind == "quantiles":
            return quantiles(*map(float, rest.split(",")))
    except ValueError as error:
        if isinstance(error, ProbeError):
            raise
    raise ProbeError(f"keep must be one of {_NAMES}, got {text!r}")
