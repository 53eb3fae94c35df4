"""Harvests for the page: their list, one site in detail, and the samples that activate a dimension most."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensortap.errors import NotARunError, suggest
from tensortap.harvest.folder import PLAN
from tensortap.harvest.reader import Harvest, open_harvest
from tensortap.harvest.statistics import SiteStatistics
from tensortap.harvest.summary import dead_dimensions, dense_dimensions, spectrum_of, top
from tensortap.reduce import histogram
from tensortap.store.files import Files
from tensortap.view.api.cache import SizedCache
from tensortap.view.api.query import Query
from tensortap.view.api.wire import Answer, ColumnAnswer

_DEEPEST: Final = 4  # folders below the one that was given
_MOST: Final = 1000
_BINS: Final = 96
_MOST_TOP: Final = 200
Decode = Callable[[list[int]], str]


class HarvestPages:
    """The harvests at or below a folder. Nothing is ever written."""

    def __init__(self, path: str | os.PathLike[str], cache: SizedCache, decode: Decode | None = None) -> None:
        self._path = os.fspath(path)
        self._files = Files(self._path)
        self._cache = cache
        self._decode = decode

    def ids(self) -> list[str]:
        """Return the harvests there are; one alone has its folder's name."""
        if self._files.exists(PLAN):
            return [self._own_id()]
        root = self._files.local
        if root is None or not root.is_dir():
            return []
        return sorted(str(found.relative_to(root)) for found in _folders(root, root.resolve(), _DEEPEST))[:_MOST]

    def listed(self) -> list[dict[str, Any]]:
        """Return a line for every harvest."""
        return [self._line(ident) for ident in self.ids()]

    def answer(self, path: str, given: Mapping[str, str]) -> Answer:
        """Return the answer to a request; the same question about the same state of a harvest is answered once."""
        query = Query(given)
        harvest = self._opened(query.text("harvest"))
        key = (path, str(query), harvest.path, len(harvest.entries), harvest.complete)
        return self._cache.get(key, lambda: REQUESTS[path](self, harvest, query), lambda made: 100_000)

    def about(self, harvest: Harvest, query: Query) -> Answer:
        """Return a harvest and a line for each of its sites."""
        sites = [_site_line(harvest, site) for site in harvest.sites]
        return {
            "id": query.text("harvest") or self.ids()[0], "path": harvest.path, "complete": harvest.complete,
            "rows": harvest.rows, "samples": harvest.samples, "set_aside": harvest.set_aside,
            "plan": {name: value for name, value in harvest.plan.about.items() if value is not None}, "sites": sites,
            "text": self._decode is not None,
        }  # fmt: skip

    def site(self, harvest: Harvest, query: Query) -> Answer:
        """Return the histogram of `site`, its spectrum, and the statistics of every dimension."""
        site = harvest.site(query.text("site", harvest.sites[0])).site
        found = harvest.statistics(site)
        rows = max(found.rows, 1)
        low, high, counts = _histogram(found)
        header = {
            **_site_line(harvest, site), "low": low, "high": high, "dead": dead_dimensions(found),
            "dense": dense_dimensions(found), "spectrum": spectrum_of(harvest, site) if found.rows else [],
        }  # fmt: skip
        dimensions = {
            "mean": found.mean, "std": found.std, "min": found.min, "max": found.max,
            "positive": found.positive / rows, "zero": found.zero / rows, "nonfinite": found.nonfinite / rows,
        }  # fmt: skip
        columns = {name: np.asarray(values, np.float32) for name, values in dimensions.items()}
        return ColumnAnswer(header, {"counts": counts, **columns})

    def top(self, harvest: Harvest, query: Query) -> Answer:
        """Return the `count` rows of `site` in which the `dimension` is largest, one of each sample."""
        site = harvest.site(query.text("site", harvest.sites[0]))
        dimension = query.number("dimension", 0)
        count = min(max(query.number("count", 20), 1), _MOST_TOP)
        rows = top(harvest, site.site, dimension, count, self._decode)
        return {"site": site.site, "dimension": dimension, "rows": [asdict(row) for row in rows]}

    def _opened(self, ident: str) -> Harvest:
        known = self.ids()
        if not ident and len(known) == 1:
            ident = known[0]
        if ident not in known:
            raise NotARunError(f"there is no harvest {ident!r} below {self._path}.{suggest(ident, known)}")
        return open_harvest(self._where(ident))

    def _where(self, ident: str) -> str:
        alone = self._files.exists(PLAN)
        return self._path if alone else os.path.join(self._path, ident)  # noqa: PTH118

    def _own_id(self) -> str:
        return self._files.root.rstrip("/").rpartition("/")[2]

    def _line(self, ident: str) -> dict[str, Any]:
        try:
            harvest = open_harvest(self._where(ident))
        except Exception as error:
            return {"id": ident, "error": f"{type(error).__name__}: {error}"}
        return {
            "id": ident, "complete": harvest.complete, "rows": harvest.rows, "samples": harvest.samples,
            "sites": len(harvest.sites), "model": harvest.plan.about.get("model"),
        }  # fmt: skip


Request = Callable[[HarvestPages, Harvest, Query], Answer]
REQUESTS: Final[Mapping[str, Request]] = {
    "/api/harvest": HarvestPages.about,
    "/api/harvest/site": HarvestPages.site,
    "/api/harvest/top": HarvestPages.top,
}


def _site_line(harvest: Harvest, name: str) -> dict[str, Any]:
    site, found = harvest.site(name), harvest.statistics(name)
    return {
        "site": name, "width": site.width, "dtype": site.dtype, "top_k": site.indices, **found.totals(),
        "dead_count": len(dead_dimensions(found)), "dense_count": len(dense_dimensions(found)),
    }  # fmt: skip


def _histogram(found: SiteStatistics) -> tuple[float, float, np.ndarray[Any, np.dtype[np.float64]]]:
    totals = found.totals()
    if not totals["finite"]:
        return 0.0, 1.0, np.zeros(0)
    low, high = totals["min"], totals["max"]
    return low, high, histogram.rebin(0, found.histogram, totals["zeros"], low, high, _BINS)


def _folders(folder: Path, root: Path, depth: int) -> Iterator[Path]:
    """Yield the folders with a `harvest.json`, at most so deep; what is hidden and what lies elsewhere is left out."""
    if (folder / PLAN).is_file():
        yield folder
        return
    try:
        inside = sorted(folder.iterdir()) if depth else []
    except OSError:  # not ours to read, or gone meanwhile
        return
    for entry in inside:
        if entry.is_dir() and not entry.name.startswith(".") and entry.resolve().is_relative_to(root):
            yield from _folders(entry, root, depth - 1)
