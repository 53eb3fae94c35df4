"""Collect the answers that the page of a report will ask for, small enough to be sent by mail.

Numbers are rounded to some bits, and steps, buckets and at last sites are left out until it fits; the page says which.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from tensortap.store.blocks import ahead
from tensortap.store.snapshot import Snapshot
from tensortap.view.api import about
from tensortap.view.api.bins import bins_for
from tensortap.view.api.phases import shown
from tensortap.view.api.query import Query, RequestError
from tensortap.view.api.rows import ReadColumns, by_place, bytes_per_record
from tensortap.view.api.service import REQUESTS, OpenRun
from tensortap.view.api.site import COLUMNS
from tensortap.view.api.wire import Answer, ColumnAnswer, encoded
from tensortap.view.report.thinning import ShownSteps, shown_steps

BYTES: Final = 4_600_000  # of answers; the page itself takes some hundred thousand more
HEAT_SHARE: Final = 0.42
TENSOR_SHARE: Final = 0.06
MEMORY: Final = 300_000_000  # of records that are held at once
_ROOM: Final = 1.5  # times the limit that all maps may seem to take, judged by one
_SAMPLE: Final = 8  # sites by which the size of all is judged
_WRITERS: Final = 2  # threads: compressing is a third of the work, and lets another run
_NUMBERS_OF_RECORD: Final = 300  # bytes without the histogram
_ENVELOPE: Final = (".low", ".high")
Entries = dict[str, dict[str, str]]
Tensors = Mapping[str, list[tuple[str, dict[str, str]]]]
Progress = Callable[[int, int], None]


class DetailLevel(NamedTuple):
    """The level of detail of an answer."""

    width: int
    buckets: int
    bits: int
    envelope: bool


HEATS: Final = tuple(
    DetailLevel(*level)
    for level in (
        (600, 0, 12, True), (600, 0, 8, True), (600, 0, 8, False), (400, 0, 7, False), (200, 0, 7, False),
        (100, 0, 6, False), (50, 0, 6, False), (16, 0, 5, False),
    )
)  # fmt: skip
SITES: Final = tuple(
    DetailLevel(*level)
    for level in (
        (200, 128, 12, True), (200, 64, 8, True), (125, 48, 7, True), (64, 32, 7, False), (32, 24, 6, False),
    )
)  # fmt: skip


class Embedded(NamedTuple):
    """The answers by address, the number of sites shown in detail, and the stride of their steps."""

    entries: Entries
    sites: int
    of: int
    every: int


class FrozenRun(NamedTuple):
    """A run as it was at one moment: every answer of a report is made from the same snapshot."""

    opened: OpenRun
    snapshot: Snapshot

    def answer(self, path: str, given: Mapping[str, str]) -> Answer:
        """Return the answer to a request of the page."""
        return REQUESTS[path](self.opened, self.snapshot, Query(given))

    def shown_steps(self) -> ShownSteps:
        """Return the steps at which sites are shown in detail."""
        shown = self.shown()
        return self.opened.grids.kept(shown, ("shown", shown.version), lambda: shown_steps(shown), lambda _: 64)

    def shown(self) -> Snapshot:
        """Return the phase that a report is about: training, where there are several."""
        return shown(self.snapshot, Query({}))


def embed(run: FrozenRun, limit: int = BYTES, progress: Progress = lambda done, total: None) -> Embedded:
    """Return all that the page asks of one run, within a number of bytes."""
    described = dict(_mapping(run.answer("/api/run", {})))
    with ThreadPoolExecutor(1, "tensortap-rules") as pool:  # rules and maps read other columns: neither waits
        coming = pool.submit(run.answer, "/api/findings", {"wait": "1"})
        maps = _heat_maps(run, described, int(limit * HEAT_SHARE))
        findings = _mapping(coming.result())
    entries = _fixed(run, findings) | maps
    order = _most_wanted(described["sites"], findings)
    tensors = dict(_tensors(run, order, int(limit * TENSOR_SHARE)))
    entries |= {address: entry for found in tensors.values() for address, entry in found}
    sites = _sites(run, order, tensors, limit - _size(entries), progress)
    described["report"] = {"sites": len(sites), "of": len(order), "every": (every := run.shown_steps().every)}
    return Embedded(entries | sites | {"/api/run": entry(described)}, len(sites), len(order), every)


def _fixed(run: FrozenRun, findings: Mapping[str, Any]) -> Entries:
    """Return what is small whatever the run."""
    found = {"/api/findings": entry(findings)}
    listed = about.listed(run.opened.ident, run.snapshot)
    found["/api/runs"] = entry({"folder": run.opened.run.path, "runs": [listed]})
    for path in ("/api/cost", "/api/timeline"):
        found[path] = entry(run.answer(path, {}))
    query = {"width": "600"}
    return found | {address("/api/metrics", query): entry(rounded(run.answer("/api/metrics", query), 12))}


def _heat_maps(run: FrozenRun, described: Mapping[str, Any], limit: int) -> Entries:
    """Embed heat maps as detailed as fits; those with far too many cells are not tried."""
    rows, steps, made = len(described["stats"]) * len(described["sites"]), described["steps"]["count"], Entries()
    stats = described["stats"]
    for detail in HEATS:
        least = rows * min(steps, detail.width // 2) * detail.bits / 12 * (2 if detail.envelope else 1)
        if detail is HEATS[-1] or (least <= 2 * limit and _one_map(run, stats, detail) * len(stats) <= _ROOM * limit):
            made = _heats(run, stats, detail)
            if _size(made) <= limit:
                break
    return made


def _one_map(run: FrozenRun, stats: list[str], detail: DetailLevel) -> int:
    """Return the size of a map in the middle of the list: of a statistic that is neither a count nor constant."""
    query = {"stat": "std" if "std" in stats else stats[len(stats) // 2], "width": str(detail.width)}
    return _size({"": _closely(run, "/api/heat", query, detail)})


def _heats(run: FrozenRun, stats: list[str], detail: DetailLevel) -> Entries:
    """Return every heat map of the whole run, and the scales by depth."""
    query = {"width": str(detail.width)}
    found = {
        address("/api/heat", {"stat": stat, **query}): _closely(run, "/api/heat", {"stat": stat, **query}, detail)
        for stat in stats
    }
    try:
        found[address("/api/depth", query)] = _closely(run, "/api/depth", {"width": str(detail.width // 2)}, detail)
    except RequestError:  # a run without records has no depth; the page says so
        return found
    return found


def _most_wanted(sites: list[dict[str, Any]], findings: Mapping[str, Any]) -> list[str]:
    """Return the sites in the order in which they are embedded: those with findings first, then by execution."""
    found = [finding["site"] for finding in findings.get("findings", ())]
    names = [site["site"] for site in sites]
    return list(dict.fromkeys([name for name in found if name in set(names)] + names))


def _sites(run: FrozenRun, order: list[str], tensors: Tensors, limit: int, progress: Progress) -> Entries:
    """Return each site in detail, as far as there is room."""
    groups = _groups(run, order)
    held = dict(_reads(run, groups)) if len(groups) == 1 else {}
    sample = order[:: max(1, len(order) // _SAMPLE)]
    sampled = [(name, held[name]) for name in sample] if held else list(_reads(run, [sample]))
    detail = _detail(run, sampled, tensors, limit / max(len(order), 1))
    found: Entries = {}
    used = 0
    reads = held.items() if held else _reads(run, groups)
    with ThreadPoolExecutor(_WRITERS, "tensortap-report") as pool:
        for key, made in ahead(pool, lambda item: _site(run, *item, detail, tensors), reads, 2 * _WRITERS):
            used += _size({key: made})
            if used > limit:
                break
            found[key] = made
            progress(len(found), len(order))
    return found


def _detail(run: FrozenRun, reads: list[tuple[str, ReadColumns]], tensors: Tensors, room: float) -> DetailLevel:
    """Return the level of detail at which all sites fit, judged by some; with no more columns than histograms
    are read.
    """
    count, histograms = len(run.shown().steps), run.shown_steps().histograms
    for detail in SITES:
        if histograms is not None and bins_for(0, count, detail.width).size > len(histograms):
            continue
        made = dict(_site(run, name, read, detail, tensors) for name, read in reads)
        if _size(made) <= 0.95 * room * len(reads):
            return detail
    return SITES[-1]


def _groups(run: FrozenRun, names: list[str]) -> list[list[str]]:
    """Return which sites are read together: as many as memory allows, for every pass goes over all files."""
    snapshot, chosen = run.shown(), run.shown_steps()
    rows = snapshot.record_count / max(len(snapshot.rows), 1)
    of_site = rows * bytes_per_record(snapshot)
    if chosen.steps is not None and chosen.histograms is not None:
        part = len(chosen.histograms) / max(len(snapshot.steps), 1)
        of_site = of_site * part + rows / chosen.every * _NUMBERS_OF_RECORD
    at_once = max(1, int(MEMORY / max(of_site, 1)))
    return [names[first : first + at_once] for first in range(0, len(names), at_once)]


def _reads(run: FrozenRun, groups: list[list[str]]) -> Iterator[tuple[str, ReadColumns]]:
    """Yield the records of each site, a group of sites at a time; for a very long run, of every n-th step."""
    snapshot, chosen = run.shown(), run.shown_steps()
    for names in groups:
        names_of = {about.triple_of(snapshot, name): name for name in names}
        for triple, read in by_place(snapshot, COLUMNS, list(names_of), chosen.steps, chosen.histograms):
            yield names_of[triple], read


def _site(
    run: FrozenRun, name: str, read: ReadColumns, detail: DetailLevel, tensors: Tensors
) -> tuple[str, dict[str, str]]:  # fmt: skip
    query = Query({"site": name, "width": str(detail.width), "buckets": str(detail.buckets)})
    answer = run.opened.site(run.shown(), query, read)
    embedded = dict(tensors.get(name, []))
    kept = [listed for listed in answer.header["tensors"] if tensor_address(name, listed) in embedded]
    answer = ColumnAnswer({**answer.header, "tensors": kept, "steps_every": run.shown_steps().every}, answer.columns)
    return address("/api/site", {"site": name}), entry(rounded(_lean(answer, detail), detail.bits))


def _tensors(run: FrozenRun, order: list[str], limit: int) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Yield the last kept tensor of each kind of each site, where it is a matrix, as far as there is room."""
    kept = {about.site_name(triple): found for triple, found in run.opened.kept(run.snapshot).items()}
    used = 0
    for name in order:
        last = {item["keeper"]: item for item in kept.get(name, ()) if 0 < len(item["shape"]) <= 2}
        found = []
        for item in last.values():
            made = entry(rounded(run.answer("/api/tensor", _tensor_query(name, item)), 8))
            used += len(made["data"])
            if used > limit:
                return
            found.append((tensor_address(name, item), made))
        yield name, found


def tensor_address(site: str, item: Mapping[str, Any]) -> str:
    """Return where the page looks for a kept tensor."""
    return address("/api/tensor", _tensor_query(site, item))


def _tensor_query(site: str, item: Mapping[str, Any]) -> dict[str, str]:
    return {"site": site, **{name: str(item[name]) for name in ("step", "call", "keeper", "rank", "probe")}}


def _closely(run: FrozenRun, path: str, query: Mapping[str, str], detail: DetailLevel) -> dict[str, str]:
    return entry(rounded(_lean(run.answer(path, query), detail), detail.bits))


def _lean(answer: Answer, detail: DetailLevel) -> Answer:
    """Return the answer without the extremes of bins, where there is no room for them."""
    if detail.envelope or not isinstance(answer, ColumnAnswer):
        return answer
    return ColumnAnswer(answer.header, {
        name: column for name, column in answer.columns.items()
        if name not in ("low", "high") and not name.endswith(_ENVELOPE)
    })  # fmt: skip


def rounded(answer: Answer, bits: int) -> Answer:
    """Round floats to so many bits after the first: what cannot be seen is left out.

    >>> rounded(ColumnAnswer({}, {"x": np.array([1.0009765, np.nan], np.float32)}), 8).columns["x"]
    array([ 1., nan], dtype=float32)
    """
    if not isinstance(answer, ColumnAnswer):
        return answer
    floats = {name: column for name, column in answer.columns.items() if column.dtype == np.float32}
    if not floats:
        return answer
    flat = _rounded(np.concatenate([column.reshape(-1) for column in floats.values()]), bits)  # all of them at once
    ends = np.cumsum([column.size for column in floats.values()])[:-1]
    cut = dict(zip(floats, np.split(flat, ends), strict=True))
    columns = {
        name: cut[name].reshape(column.shape) if name in cut else column for name, column in answer.columns.items()
    }
    return ColumnAnswer(answer.header, columns)


def _rounded(column: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    drop = 23 - bits
    whole = column.view(np.uint32)
    cut = ((whole + np.uint32(1 << (drop - 1))) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)).view(np.float32)
    return np.where(np.isfinite(column) & np.isfinite(cut), cut, column).astype(np.float32)


def address(path: str, query: Mapping[str, str]) -> str:
    """Return path and query, keys in order, as the page looks it up.

    >>> address("/api/site", {"width": "200", "site": "a b:output"})
    '/api/site?site=a%20b%3Aoutput&width=200'
    """
    given = "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted(query.items()) if value)
    return f"{path}?{given}" if given else path


def entry(answer: Answer) -> dict[str, str]:
    """Return an answer as text that cannot end a tag."""
    packed = gzip.compress(encoded(answer), 6, mtime=0)
    kind = "columns" if isinstance(answer, ColumnAnswer) else "json"
    return {"type": kind, "data": base64.b64encode(packed).decode()}


def _size(entries: Entries) -> int:
    return sum(len(key) + len(made["data"]) + 40 for key, made in entries.items())


def _mapping(answer: Answer) -> Mapping[str, Any]:
    assert not isinstance(answer, ColumnAnswer)
    return answer
