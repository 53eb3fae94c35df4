"""Show the histograms of many steps as bands of quantiles, and as rows of a picture."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.reduce import histogram as buckets
from tensortap.reduce.merge import merge_histograms
from tensortap.view.api.grid import Ints, as_floats

QUANTILES: Final = {"q01": 0.01, "q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95, "q99": 0.99}
ROWS: Final = 128
Floats = npt.NDArray[np.float64]


def distribution(table: Any, bin_of: Ints, count: int, most: int = ROWS) -> dict[str, npt.NDArray[Any]]:
    """Quantiles (`q50`) and shares of the elements (`hist`, with `edges`) by bin, of records sorted by step."""
    starts: Ints = np.flatnonzero(np.diff(bin_of, prepend=-1)).astype(np.int64)
    merged = _merged(table, starts)
    zeros = np.add.reduceat(table["zeros"].to_numpy(), starts)
    low, high = np.fmin.reduceat(table["min"].to_numpy(), starts), np.fmax.reduceat(table["max"].to_numpy(), starts)
    bands = np.full((len(QUANTILES), count), np.nan)
    for i, (offset, counts) in enumerate(merged):
        if not np.isnan(low[i]):
            bands[:, bin_of[starts[i]]] = buckets.quantile(
                list(QUANTILES.values()), offset, counts, int(zeros[i]), minimum=low[i], maximum=high[i]
            )
    shares, edges = _picture(merged, zeros, float(np.nanmax(np.abs([low, high]), initial=0.0)), most)
    hist = np.full((count, shares.shape[1]), np.nan, np.float32)
    hist[bin_of[starts]] = shares
    return {name: as_floats(band) for name, band in zip(QUANTILES, bands, strict=True)} | {"hist": hist, "edges": edges}


def _merged(table: Any, starts: Ints) -> list[tuple[int, npt.NDArray[np.int64]]]:
    lists = table["hist_counts"].combine_chunks()
    lists = pa.concat_arrays(lists.chunks) if isinstance(lists, pa.ChunkedArray) else lists
    offsets, ends = table["hist_offset"].to_numpy().astype(np.int64), lists.offsets.to_numpy().astype(np.int64)
    return merge_histograms(offsets, ends, lists.values.to_numpy().astype(np.int64), starts)


def _picture(
    merged: list[tuple[int, npt.NDArray[np.int64]]], zeros: npt.NDArray[np.int64], largest: float, most: int
) -> tuple[npt.NDArray[np.float32], Floats]:  # fmt: skip
    """Return shares of the finite elements in at most `most` steps of magnitude, and the steps' ends."""
    dense = np.stack([buckets.dense(*found) for found in merged]).reshape(len(merged), -1, 2)
    used = np.flatnonzero(dense.any(axis=(0, 2)))
    total = np.maximum(dense.sum(axis=(1, 2)) + zeros, 1)[:, None]
    if not len(used):
        return (zeros[:, None] / total).astype(np.float32), np.zeros(2)
    signs = [sign for sign in (1, 0) if dense[:, :, sign].any()]
    width = 1
    while ((used[-1] // width) - (used[0] // width) + 1) * len(signs) + 1 > most:
        width *= 2
    starts = np.arange(used[0] // width * width, used[-1] + 1, width)
    parts: list[npt.NDArray[Any]] = []
    ends: list[npt.ArrayLike] = []
    near = buckets.edges(2 * starts)[0]
    far = np.append(near[1:], max(near[-1], min(largest, float(buckets.edges(2 * (starts[-1] + width - 1))[1]))))
    for sign in signs:
        part = np.add.reduceat(dense[:, starts[0] : used[-1] + 1, sign], starts - starts[0], axis=1)
        parts += [part[:, ::-1], zeros[:, None]] if sign else ([] if 1 in signs else [zeros[:, None]]) + [part]
        ends += [-far[::-1], [-near[0]]] if sign else [[near[0]], far]
    if signs == [0]:
        ends = [[0.0], *ends]
    elif signs == [1]:
        ends = [*ends, [0.0]]
    return (np.concatenate(parts, axis=1) / total).astype(np.float32), np.concatenate(
        [np.asarray(end, np.float64) for end in ends]
    )
