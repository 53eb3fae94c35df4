"""How far one harvest has drifted from another, by site and dimension.

Tokens of one sample depend on each other, and a test that took them for independent would see drift everywhere. So
one random row of each sample is compared. A dimension has drifted when both speak for it: the population stability
index, which says how much, and a Kolmogorov-Smirnov test, which says how surely; the test's p-values are adjusted for
the number of dimensions and sites (Benjamini and Hochberg).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from tensortap import text
from tensortap.diff import Diff
from tensortap.diff.runs import RunLike
from tensortap.diff.runs import diff as diff_runs
from tensortap.errors import HarvestError
from tensortap.harvest.dtypes import NATIVE
from tensortap.harvest.folder import is_harvest
from tensortap.harvest.reader import Harvest, open_harvest
from tensortap.harvest.rows import Array, mixed
from tensortap.harvest.shard_file import vectors
from tensortap.harvest.shards import VALUES

Floats = npt.NDArray[np.float64]
HarvestLike = Harvest | str | os.PathLike[str]
PSI: Final = 0.2  # what is commonly taken for a shift that matters
SIGNIFICANCE: Final = 0.01
MOST_SAMPLES: Final = 10_000
FEWEST_SAMPLES: Final = 30
_BINS: Final = 10


@dataclass(frozen=True, slots=True)
class SiteDrift:
    """The drift of one site: an index and an adjusted p-value for each dimension."""

    site: str
    samples: tuple[int, int]
    psi: Floats
    q: Floats
    drifted: tuple[int, ...]  # dimensions, the farthest first

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "site": self.site, "samples": list(self.samples), "drifted": list(self.drifted),
            "psi": [round(float(x), 6) for x in self.psi], "q": [float(x) for x in self.q],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drift:
    """Two harvests compared. True when nothing has drifted; printed, what has."""

    a: str
    b: str
    sites: tuple[SiteDrift, ...]
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not any(site.drifted for site in self.sites)

    def __str__(self) -> str:
        return "\n".join([self.headline, *(_line(site) for site in self.sites)])

    @property
    def headline(self) -> str:
        """What was found, in a line."""
        bad = [site for site in self.sites if site.drifted]
        if not bad:
            return f"no drift in {text.counted(len(self.sites), 'site')}"
        dimensions = sum(len(site.drifted) for site in bad)
        return f"{text.counted(dimensions, 'dimension')} of {text.counted(len(bad), 'site')} drifted"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "a": self.a, "b": self.b, "same": bool(self), "sites": [site.to_dict() for site in self.sites],
            "only_in_a": list(self.only_in_a), "only_in_b": list(self.only_in_b),
        }  # fmt: skip


def drift(
    a: HarvestLike, b: HarvestLike, *, sites: Sequence[str] | None = None, psi: float = PSI,
    significance: float = SIGNIFICANCE, samples: int = MOST_SAMPLES, seed: int = 0,
) -> Drift:  # fmt: skip
    """Compare harvest `b` with the baseline `a`, dimension by dimension."""
    for option, given in (("psi", psi), ("significance", significance), ("samples", samples)):
        if isinstance(given, bool) or not isinstance(given, (int, float)) or given <= 0:
            raise HarvestError(f"{option} must be a number above 0, got {given!r}: write tt.diff(a, b, psi=0.2)")
    first, second = (each if isinstance(each, Harvest) else open_harvest(each) for each in (a, b))
    names = [first.site(site).site for site in sites] if sites else [s for s in first.sites if s in second.sites]
    if not names:
        raise HarvestError(f"{first.path} and {second.path} have no site in common: {first.sites} and {second.sites}")
    compared = [_compared(first, second, name, samples, seed) for name in names]
    adjusted = np.split(
        adjust(np.concatenate([p for *_, p in compared])), np.cumsum([len(p) for *_, p in compared])[:-1]
    )
    found = []
    for name, (counts, index, _), q in zip(names, compared, adjusted, strict=True):
        bad = np.flatnonzero((index > psi) & (q < significance))
        found.append(SiteDrift(name, counts, index, q, tuple(bad[np.argsort(-index[bad], kind="stable")].tolist())))
    only_a, only_b = ([s for s in x.sites if s not in y.sites] for x, y in ((first, second), (second, first)))
    return Drift(first.path, second.path, tuple(found), tuple(only_a), tuple(only_b))


@overload
def diff(a: Harvest, b: HarvestLike, **options: Any) -> Drift: ...
@overload
def diff(a: RunLike, b: RunLike, **options: Any) -> Diff: ...
@wraps(diff_runs)
def diff(a: Any, b: Any, **options: Any) -> Any:
    """Compare two runs, or two harvests: where runs first diverge, or which dimensions have drifted."""
    return drift(a, b, **options) if _holds_harvest(a) or _holds_harvest(b) else diff_runs(a, b, **options)


def one_row_per_sample(harvest: Harvest, site: str, most: int, seed: int) -> Array:
    """Return a random row of each sample, of so many random samples at most, as float32."""
    plan = harvest.site(site)
    files = harvest.files(site)
    if not files:
        return np.zeros((0, plan.width), np.float32)
    places = [_places(harvest, name) for name in files]
    sample, position = (np.concatenate([each[i] for each in places]) for i in range(2))
    row = np.concatenate([np.arange(len(each[0])) for each in places])
    file = np.repeat(np.arange(len(files)), [len(each[0]) for each in places])
    order = np.lexsort((mixed(seed, sample, position), sample))
    firsts = order[np.unique(sample[order], return_index=True)[1]]
    chosen = firsts[np.argsort(mixed(seed + 1, sample[firsts], position[firsts] * 0))[:most]]
    found = []
    for number, name in enumerate(files):
        wanted = np.sort(row[chosen[file[chosen] == number]])
        if len(wanted):
            blocks = list(vectors(harvest.column(name, VALUES), NATIVE[plan.dtype], plan.width))
            found.append(np.concatenate(blocks)[wanted].astype(np.float32))
    return np.concatenate(found) if found else np.zeros((0, plan.width), np.float32)


def stability_index(baseline: Array, now: Array) -> Floats:
    """Return the population stability index of each dimension, over tenths of the baseline.

    Half a row is added to every bin, so that an empty one is not infinitely far.
    """
    out = np.zeros(baseline.shape[1])
    for i in range(baseline.shape[1]):
        inner = np.unique(np.quantile(baseline[:, i], np.arange(1, _BINS) / _BINS, method="lower"))
        sides = [
            np.bincount(np.searchsorted(inner, x[:, i], "left"), minlength=len(inner) + 1) for x in (baseline, now)
        ]
        p, q = ((counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in sides)
        out[i] = float(((q - p) * np.log(q / p)).sum())
    return out


def two_sample_test(a: Array, b: Array) -> Floats:
    """Return the p-value of the two-sample Kolmogorov-Smirnov test for each dimension (its asymptotic form)."""
    n, m = len(a), len(b)
    effective = (n * m / (n + m)) ** 0.5
    out = np.ones(a.shape[1])
    for i in range(a.shape[1]):
        x, y = np.sort(a[:, i]), np.sort(b[:, i])
        both = np.concatenate([x, y])
        distance = np.abs(np.searchsorted(x, both, "right") / n - np.searchsorted(y, both, "right") / m).max()
        out[i] = _kolmogorov((effective + 0.12 + 0.11 / effective) * distance)
    return out


def adjust(p: Floats) -> Floats:
    """Return p-values adjusted for their number: the false discovery rate of Benjamini and Hochberg.

    >>> adjust(np.array([0.01, 0.02, 0.03, 0.5])).round(3).tolist()
    [0.04, 0.04, 0.04, 0.5]
    """
    order = np.argsort(p)
    scaled = p[order] * len(p) / np.arange(1, len(p) + 1)
    out = np.empty(len(p))
    out[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return out


def _compared(a: Harvest, b: Harvest, site: str, most: int, seed: int) -> tuple[tuple[int, int], Floats, Floats]:
    if a.site(site).indices or b.site(site).indices:
        raise HarvestError(
            f"{site} must be kept whole, got the largest elements of each row, whose columns are no dimensions: "
            "compare harvests with keep=tt.tokens() or tt.pooled()"
        )
    if (widths := (a.site(site).width, b.site(site).width))[0] != widths[1]:
        raise HarvestError(f"{site} is {widths[0]} wide in {a.path} and {widths[1]} in {b.path}: no drift can be told")
    sides = [np.nan_to_num(one_row_per_sample(each, site, most, seed), nan=np.inf, posinf=np.inf) for each in (a, b)]
    counts = (len(sides[0]), len(sides[1]))
    if min(counts) < FEWEST_SAMPLES:
        raise HarvestError(f"{site} must have at least {FEWEST_SAMPLES} samples on both sides, got {counts}")
    return counts, stability_index(*sides), two_sample_test(*sides)


def _places(harvest: Harvest, name: str) -> list[Array]:
    columns = (harvest.column(name, column) for column in ("sample", "position"))
    return [column.fill_null(-1).to_numpy().astype(np.int64) for column in columns]


def _kolmogorov(x: float) -> float:
    if x < 0.3:
        return 1.0
    k = np.arange(1, 101)
    return float(np.clip(2 * ((-1.0) ** (k - 1) * np.exp(-2 * k**2 * x**2)).sum(), 0.0, 1.0))


def _holds_harvest(value: Any) -> bool:
    return isinstance(value, Harvest) or (isinstance(value, (str, os.PathLike)) and is_harvest(value))


def _line(site: SiteDrift) -> str:
    worst = int(np.argmax(site.psi))
    counts = f"{site.samples[0]:,} and {site.samples[1]:,} samples"
    if not site.drifted:
        return f"  {site.site}: none of {len(site.psi)} dimensions; largest PSI {site.psi[worst]:.3f}; {counts}"
    listed = ", ".join(f"{i} (PSI {site.psi[i]:.2f})" for i in site.drifted[:5])
    more = f" and {len(site.drifted) - 5} more" if len(site.drifted) > 5 else ""
    return f"  {site.site}: {len(site.drifted)} of {len(site.psi)} dimensions: {listed}{more}; {counts}"
