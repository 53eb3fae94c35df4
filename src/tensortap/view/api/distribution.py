"""Show the histograms of many steps as bands of quantiles, and as rows of a picture."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.reduce import histogram as buckets
from tensortap.view.api.grid import Ints, as_floats

QUANTILES: Final = {"q01": 0.01, "q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95, "q99": 0.99}
ROWS: Final = 128
Floats = npt.NDArray[np.float64]


class _BucketCounts(NamedTuple):
    """The counts of buckets, a row for each bin: of those from `first`, which is even, to the last that is used."""

    counts: Ints
    first: int

    def used(self) -> Ints:
        """Return the numbers of the buckets that hold anything."""
        return self.first + np.flatnonzero(self.counts.any(axis=0))

    def of(self, buckets: Ints) -> Ints:
        """Return the counts of some buckets."""
        return self.counts[:, buckets - self.first]


def distribution(table: Any, bin_of: Ints, count: int, most: int = ROWS) -> dict[str, npt.NDArray[Any]]:
    """Return quantiles (`q50`) and shares of the elements (`hist`, with `edges`) by bin, of records sorted by step."""
    starts: Ints = np.flatnonzero(np.diff(bin_of, prepend=-1)).astype(np.int64)
    dense = _merged(table, starts)
    zeros = np.add.reduceat(table["zeros"].to_numpy(), starts)
    low, high = np.fmin.reduceat(table["min"].to_numpy(), starts), np.fmax.reduceat(table["max"].to_numpy(), starts)
    bands = np.full((len(QUANTILES), count), np.nan)
    bands[:, bin_of[starts]] = _bands(dense, zeros, low, high).T
    shares, edges = _picture(dense, zeros, float(np.nanmax(np.abs([low, high]), initial=0.0)), most)
    hist = np.full((count, shares.shape[1]), np.nan, np.float32)
    hist[bin_of[starts]] = shares
    return dict(zip(QUANTILES, as_floats(bands), strict=True)) | {"hist": hist, "edges": edges}


def _merged(table: Any, starts: Ints) -> _BucketCounts:
    """Return the counts of buckets, a row for each bin."""
    lists = table["hist_counts"].combine_chunks()
    lists = pa.concat_arrays(lists.chunks) if isinstance(lists, pa.ChunkedArray) else lists
    offsets, ends = table["hist_offset"].to_numpy().astype(np.int64), lists.offsets.to_numpy().astype(np.int64)
    lengths, counts = np.diff(ends), np.nan_to_num(lists.flatten().to_numpy(zero_copy_only=False))
    row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(table))))
    bucket = np.repeat(offsets - ends[:-1], lengths) + np.arange(ends[0], ends[-1])
    inside = (bucket >= 0) & (bucket < buckets.BUCKETS)  # a damaged file may name others
    if not inside.all():
        row, bucket, counts = np.repeat(row, lengths)[inside], bucket[inside], counts[inside]
    else:
        row = np.repeat(row, lengths)
    first = int(bucket.min(initial=buckets.BUCKETS)) & ~1
    width = max((int(bucket.max(initial=-1)) | 1) + 1 - first, 0)
    dense = np.bincount(row * width + (bucket - first), counts, len(starts) * width)
    return _BucketCounts(dense.astype(np.int64).reshape(len(starts), width), first)


def _bands(dense: _BucketCounts, zeros: Ints, low: Floats, high: Floats) -> Floats:
    """Return the quantiles of each bin, as `histogram.quantile` gives them of one; NaN where nothing was finite."""
    used = dense.used()
    negative, positive = used[used % 2 == 1][::-1], used[used % 2 == 0]
    number = np.concatenate([dense.of(negative), zeros[:, None], dense.of(positive)], axis=1)
    begin, end = (
        np.concatenate([side_of_negative, [0.0], side])
        for side_of_negative, side in zip(buckets.edges(negative), buckets.edges(positive), strict=True)
    )
    ends, share = np.cumsum(number, axis=1), np.array(list(QUANTILES.values()))
    rank = np.maximum(np.ceil(share * ends[:, -1:]), 1)
    at = np.minimum((ends[:, None, :] < rank[:, :, None]).sum(axis=2), number.shape[1] - 1)
    count, before = (np.take_along_axis(part, at, axis=1) for part in (number, ends - number))
    least, most = low[:, None], high[:, None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        place = (rank - before - 0.5) / count
        first, last = np.clip(begin[at], least, most), np.clip(end[at], least, most)
        found = np.clip(first * (1 - place) + last * place, least, most)
    return np.where((ends[:, -1:] > 0) & ~np.isnan(least), found, np.nan)


def _picture(
    counts: _BucketCounts, zeros: Ints, largest: float, most: int
) -> tuple[npt.NDArray[np.float32], Floats]:  # fmt: skip
    """Return shares of the finite elements in at most `most` steps of magnitude, and the steps' ends."""
    dense = counts.counts.reshape(len(zeros), counts.counts.shape[1] // 2, 2)  # by magnitude and sign
    first = counts.first // 2
    used = first + np.flatnonzero(dense.any(axis=(0, 2)))
    total = np.maximum(dense.sum(axis=(1, 2)) + zeros, 1)[:, None]
    if not len(used):
        return (zeros[:, None] / total).astype(np.float32), np.zeros(2)
    signs = [sign for sign in (1, 0) if dense[:, :, sign].any()]
    width = 1
    while ((used[-1] // width) - (used[0] // width) + 1) * len(signs) + 1 > most:
        width *= 2
    starts = np.arange(used[0] // width * width, used[-1] + 1, width)
    begins = np.maximum(starts - first, 0)
    parts: list[npt.NDArray[Any]] = []
    ends: list[npt.ArrayLike] = []
    near = buckets.edges(2 * starts)[0]
    far = np.append(near[1:], max(near[-1], min(largest, float(buckets.edges(2 * (starts[-1] + width - 1))[1]))))
    for sign in signs:
        part = np.add.reduceat(dense[:, begins[0] : used[-1] + 1 - first, sign], begins - begins[0], axis=1)
        parts += [part[:, ::-1], zeros[:, None]] if sign else ([] if 1 in signs else [zeros[:, None]]) + [part]
        ends += [-far[::-1], [-near[0]]] if sign else [[near[0]], far]
    if signs == [0]:
        ends = [[0.0], *ends]
    elif signs == [1]:
        ends = [*ends, [0.0]]
    return (np.concatenate(parts, axis=1) / total).astype(np.float32), np.concatenate(
        [np.asarray(end, np.float64) for end in ends]
    )
