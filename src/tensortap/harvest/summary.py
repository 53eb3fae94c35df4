"""What a harvest shows: dead and dense dimensions of each site, its spectrum, and what activates a dimension most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap import text
from tensortap.errors import HarvestError
from tensortap.harvest.reader import Harvest
from tensortap.harvest.statistics import SiteStatistics
from tensortap.harvest.window import RowBatch
from tensortap.reduce import histogram

Floats = npt.NDArray[np.float64]
_SKETCH: Final = 64  # directions that the sketch holds
_ROWS: Final = 20_000  # rows that a spectrum is made of
_BATCH: Final = 2048
_AROUND: Final = 12  # tokens of text on either side


@dataclass(frozen=True, slots=True)
class SiteSummary:
    """One site of a harvest."""

    site: str
    rows: int
    width: int
    dtype: str
    totals: dict[str, Any]
    dead: list[int]  # dimensions that never change; none where only the largest elements were kept
    dense: list[int]  # dimensions that are positive in every row; the same
    spectrum: list[float]  # the share of the variance along each principal axis, the largest first
    bars: str
    damage: str = ""  # why its rows cannot all be read; the other numbers are of the time when they were written

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "bars"}


@dataclass(frozen=True, slots=True)
class Activation:
    """A row in which a dimension is large."""

    value: float
    sample: int
    position: int
    token: int
    text: str = ""
    around: tuple[str, str, str] = ("", "", "")  # the text before the token, the token, and the text behind it


def summarize_sites(harvest: Harvest, spectrum: bool = True) -> list[SiteSummary]:
    """Return a summary of every site."""
    return [_summary(harvest, site, spectrum) for site in harvest.sites]


def top(
    harvest: Harvest, site: str, dimension: int, k: int = 10, decode: Callable[[list[int]], str] | None = None
) -> list[Activation]:
    """Return the rows in which a dimension of a site is largest, one of each sample, the largest first.

    `decode` turns token ids into text, as a tokenizer's `decode` does.
    """
    plan = harvest.site(site)
    if dimension < 0 or (dimension >= plan.width and not plan.indices):
        raise HarvestError(f"dimension must be between 0 and {plan.width - 1}, got {dimension}")
    best: list[Activation] = []
    for batch in harvest.batches(_BATCH, site, seed=None):
        values = _of_dimension(batch, dimension)
        order = np.argsort(-values, kind="stable")
        firsts = order[np.sort(np.unique(batch.sample[order], return_index=True)[1])[:k]]
        firsts = firsts[values[firsts] > -np.inf]
        best += [
            Activation(float(values[i]), int(batch.sample[i]), int(batch.position[i]), int(batch.token[i]))
            for i in firsts
        ]  # fmt: skip
        best.sort(key=lambda each: (-each.value, each.sample, each.position))
        best = list({each.sample: each for each in reversed(best)}.values())[::-1][:k]
    return best if decode is None else _with_text(harvest, site, best, decode)


def _of_dimension(batch: RowBatch, dimension: int) -> npt.NDArray[np.float32]:
    """Return a dimension's value in every row; -inf where only the largest were kept and it is not among them."""
    if not batch.indices:
        return np.nan_to_num(batch.values[:, dimension].astype(np.float32), nan=-np.inf)
    among = next(iter(batch.indices.values())) == dimension
    return np.asarray(np.where(among, batch.values.astype(np.float32), -np.inf).max(axis=1))


def _with_text(
    harvest: Harvest, site: str, rows: list[Activation], decode: Callable[[list[int]], str]
) -> list[Activation]:
    """Return the rows with the text around them, put together from the token ids of their samples."""
    tokens: dict[int, dict[int, int]] = {row.sample: {} for row in rows}
    for path in harvest.files(site):
        sample, position, token = (
            harvest.column(path, name).fill_null(-1).to_numpy() for name in ("sample", "position", "token")
        )
        for i in np.flatnonzero(np.isin(sample, list(tokens)) & (token >= 0)):
            tokens[int(sample[i])][int(position[i])] = int(token[i])
    return [_text_around(row, tokens[row.sample], decode) for row in rows]


def _text_around(row: Activation, tokens: dict[int, int], decode: Callable[[list[int]], str]) -> Activation:
    near = [i for i in sorted(tokens) if row.position < 0 or abs(i - row.position) <= _AROUND]
    pieces = [
        [tokens[i] for i in near if i < row.position],
        [tokens[i] for i in near if i == row.position],
        [tokens[i] for i in near if i > row.position],
    ]
    before, token, after = (decode(piece) if piece else "" for piece in pieces)
    return replace(row, text=decode([tokens[i] for i in near]), around=(before, token, after))


def spectrum_of(harvest: Harvest, site: str, rows: int = _ROWS) -> list[float]:
    """Return the share of the variance along each principal axis of a site, from a sketch of random rows.

    There are none where only the largest elements were kept.
    """
    if harvest.site(site).indices:
        return []
    center = harvest.statistics(site).mean
    sketch = DirectionSketch(len(center))
    seen = 0
    for batch in harvest.batches(min(_BATCH, rows), harvest.site(site).site, memory="64MB"):
        sketch.add(np.nan_to_num(batch.values.astype(np.float64) - center, posinf=0.0, neginf=0.0))
        seen += len(batch)
        if seen >= rows:
            break
    return [round(float(share), 6) for share in sketch.shares()]


class DirectionSketch:
    """Frequent directions: the principal axes of a stream of rows in the memory of a few of them.

    >>> sketch = DirectionSketch(3)
    >>> sketch.add(np.array([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]] * 50))
    >>> [round(float(share), 2) for share in sketch.shares()]
    [0.9, 0.1]
    """

    def __init__(self, width: int) -> None:
        self._size = min(_SKETCH, width)
        self._rows = np.zeros((0, width))
        self._total = 0.0

    def add(self, rows: Floats) -> None:
        """Add rows, whose mean is zero."""
        self._total += float((rows * rows).sum())
        step = max(self._size, 256)
        for start in range(0, len(rows), step):
            self._rows = self._shrunk(np.concatenate([self._rows, rows[start : start + step]]))

    def shares(self) -> Floats:
        """Return the shares of the variance, the largest first."""
        if not self._total:
            return np.zeros(0)
        values = np.linalg.svd(self._rows, compute_uv=False) ** 2
        return np.asarray(values[values > 1e-9 * self._total] / self._total)

    def _shrunk(self, rows: Floats) -> Floats:
        _, values, axes = np.linalg.svd(rows, full_matrices=False)
        if len(values) <= self._size:
            return np.asarray(values[:, None] * axes)
        kept = np.sqrt(np.maximum(values[: self._size] ** 2 - values[self._size] ** 2, 0.0))
        return np.asarray(kept[:, None] * axes[: self._size])


def dead_dimensions(found: SiteStatistics) -> list[int]:
    """Return the dimensions that never change."""
    return [int(i) for i in np.flatnonzero((found.squares == 0) & (found.nonfinite == 0) & (found.finite > 0))]


def dense_dimensions(found: SiteStatistics) -> list[int]:
    """Return the dimensions that are positive in every row."""
    return [int(i) for i in np.flatnonzero((found.positive == found.rows) & (found.squares > 0))]


def _summary(harvest: Harvest, name: str, spectrum: bool) -> SiteSummary:
    site, found, damage = harvest.site(name), harvest.statistics(name), ""
    axes: list[float] = []
    try:
        axes = spectrum_of(harvest, name) if spectrum else []
    except HarvestError as error:
        damage = str(error)
    return SiteSummary(
        name, found.rows, site.width, site.dtype, found.totals(), dead=[] if site.indices else dead_dimensions(found),
        dense=[] if site.indices else dense_dimensions(found), spectrum=axes, bars=_bars(found), damage=damage,
    )  # fmt: skip


def _bars(found: SiteStatistics) -> str:
    totals = found.totals()
    if not totals["finite"]:
        return ""
    counts = histogram.rebin(0, found.histogram, totals["zeros"], totals["min"], totals["max"], 16)
    return text.bars([float(count) for count in counts])
