"""What a report carries: the answers the page will ask for, made small enough to be sent by mail.

Numbers are rounded to some bits, and steps, buckets and at last sites are left out until it fits: what was, is told.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from tensortap.view.api.query import AskedError, Query
from tensortap.view.api.rows import Read, by_place
from tensortap.view.api.service import Api
from tensortap.view.api.site import COLUMNS
from tensortap.view.api.wire import Answer, Columns, encoded

BYTES: Final = 4_600_000  # of answers; the page itself takes some hundred thousand more
HEAT_SHARE: Final = 0.42
TENSOR_SHARE: Final = 0.06
RECORDS: Final = 1_000_000  # of a longer run every n-th step is looked at closely
ROWS_AT_ONCE: Final = 50_000
_SAMPLE: Final = 8  # sites by which the size of all is judged
_ENVELOPE: Final = (".low", ".high")
Entries = dict[str, dict[str, str]]
Tensors = Mapping[str, list[tuple[str, dict[str, str]]]]
Progress = Callable[[int, int], None]


class Detail(NamedTuple):
    """How closely something is carried."""

    width: int
    buckets: int
    bits: int
    envelope: bool


HEATS: Final = (
    Detail(600, 0, 12, True), Detail(600, 0, 8, True), Detail(600, 0, 8, False), Detail(400, 0, 7, False),
    Detail(200, 0, 7, False), Detail(100, 0, 6, False), Detail(50, 0, 6, False), Detail(16, 0, 5, False),
)  # fmt: skip
SITES: Final = (
    Detail(200, 128, 12, True), Detail(200, 64, 8, True), Detail(125, 48, 7, True), Detail(64, 32, 7, False),
    Detail(32, 24, 6, False),
)  # fmt: skip


class Carried(NamedTuple):
    """The answers by address, how many of the run's sites can be looked at closely, and at every how many-th step."""

    entries: Entries
    sites: int
    of: int
    every: int


def carried(api: Api, limit: int = BYTES, progress: Progress = lambda done, total: None) -> Carried:
    """All that the page asks of one run, within a number of bytes."""
    run = dict(_mapping(api.answer("/api/run", {})))
    findings = _mapping(api.answer("/api/findings", {"wait": "1"}))
    entries = _fixed(api, findings)
    entries |= _heat_maps(api, run, int(limit * HEAT_SHARE))
    order = _most_wanted(run["sites"], findings)
    tensors = dict(_tensors(api, order, int(limit * TENSOR_SHARE)))
    entries |= {address: entry for found in tensors.values() for address, entry in found}
    sites = _sites(api, order, tensors, limit - _size(entries), progress)
    run["report"] = {"sites": len(sites), "of": len(order), "every": (every := _every(api))}
    return Carried(entries | sites | {"/api/run": entry(run)}, len(sites), len(order), every)


def _fixed(api: Api, findings: Mapping[str, Any]) -> Entries:
    """What is small whatever the run."""
    found = {"/api/findings": entry(findings)}
    found |= {path: entry(api.answer(path, {})) for path in ("/api/runs", "/api/cost")}
    asked = {"width": "600"}
    return found | {address("/api/metrics", asked): entry(rounded(api.answer("/api/metrics", asked), 12))}


def _heat_maps(api: Api, run: Mapping[str, Any], limit: int) -> Entries:
    """As closely as fits; what is far too large by its number of cells is not even tried."""
    rows, steps, made = len(run["stats"]) * len(run["sites"]), run["steps"]["count"], Entries()
    for detail in HEATS:
        least = rows * min(steps, detail.width // 2) * detail.bits / 12 * (2 if detail.envelope else 1)
        if detail is HEATS[-1] or least <= 2 * limit:
            made = _heats(api, run["stats"], detail)
            if _size(made) <= limit:
                break
    return made


def _heats(api: Api, stats: list[str], detail: Detail) -> Entries:
    """Every heat map of the whole run, and the scales by depth."""
    asked = {"width": str(detail.width)}
    found = {
        address("/api/heat", {"stat": stat, **asked}): _closely(api, "/api/heat", {"stat": stat, **asked}, detail)
        for stat in stats
    }
    try:
        found[address("/api/depth", asked)] = _closely(api, "/api/depth", {"width": str(detail.width // 2)}, detail)
    except AskedError:  # a run without records has no depth; the page says so
        return found
    return found


def _most_wanted(sites: list[dict[str, Any]], findings: Mapping[str, Any]) -> list[str]:
    """The sites in the order in which they are carried when not all can be: findings first, then by execution."""
    found = [finding["site"] for finding in findings.get("findings", ())]
    names = [site["site"] for site in sites]
    return list(dict.fromkeys([name for name in found if name in set(names)] + names))


def _sites(api: Api, order: list[str], tensors: Tensors, limit: int, progress: Progress) -> Entries:
    """Each site closely, as far as there is room."""
    detail = _detail(api, order[:: max(1, len(order) // _SAMPLE)], tensors, limit / max(len(order), 1))
    found: Entries = {}
    used = 0
    for name, read in _reads(api, order):
        key, made = _site(api, name, read, detail, tensors)
        used += _size({key: made})
        if used > limit:
            break
        found[key] = made
        progress(len(found), len(order))
    return found


def _detail(api: Api, sample: list[str], tensors: Tensors, room: float) -> Detail:
    """How closely all can be carried, judged by some."""
    reads = list(_reads(api, sample))
    for detail in SITES:
        made = dict(_site(api, name, read, detail, tensors) for name, read in reads)
        if _size(made) <= 0.95 * room * len(sample):
            return detail
    return SITES[-1]


def _reads(api: Api, names: list[str]) -> Iterator[tuple[str, Read]]:
    """The records of each site, as many sites at once as memory allows; of a very long run every n-th step."""
    opened = api.opened("")
    seen = opened.watched.look()
    every = _every(api)
    at_once = max(1, ROWS_AT_ONCE * every * len(seen.row) // max(seen.records, 1))
    for first in range(0, len(names), at_once):
        part = {seen.triple(name): name for name in names[first : first + at_once]}
        for triple, read in by_place(opened.run, seen, COLUMNS, list(part), every):
            yield part[triple], read


def _every(api: Api) -> int:
    """Of a very long run every n-th recorded step is looked at closely."""
    return max(1, -(-api.opened("").watched.look().records // RECORDS))


def _site(api: Api, name: str, read: Read, detail: Detail, tensors: Tensors) -> tuple[str, dict[str, str]]:
    asked = Query({"site": name, "width": str(detail.width), "buckets": str(detail.buckets)})
    answer = api.opened("").site(asked, read)
    carried = dict(tensors.get(name, []))
    kept = [listed for listed in answer.header["tensors"] if tensor_address(name, listed) in carried]
    answer = Columns({**answer.header, "tensors": kept, "steps_every": _every(api)}, answer.columns)
    return address("/api/site", {"site": name}), entry(rounded(_lean(answer, detail), detail.bits))


def _tensors(api: Api, order: list[str], limit: int) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """The last kept tensor of each kind of each site, where it is a matrix, as far as there is room."""
    kept, used = api.opened("").kept_by_name(), 0
    for name in order:
        last = {item["keeper"]: item for item in kept.get(name, ()) if 0 < len(item["shape"]) <= 2}
        found = []
        for item in last.values():
            made = entry(rounded(api.answer("/api/tensor", _tensor_asked(name, item)), 8))
            used += len(made["data"])
            if used > limit:
                return
            found.append((tensor_address(name, item), made))
        yield name, found


def tensor_address(site: str, item: Mapping[str, Any]) -> str:
    """Where the page looks for a kept tensor."""
    return address("/api/tensor", _tensor_asked(site, item))


def _tensor_asked(site: str, item: Mapping[str, Any]) -> dict[str, str]:
    return {"site": site, **{name: str(item[name]) for name in ("step", "call", "keeper", "rank", "probe")}}


def _closely(api: Api, path: str, asked: Mapping[str, str], detail: Detail) -> dict[str, str]:
    return entry(rounded(_lean(api.answer(path, asked), detail), detail.bits))


def _lean(answer: Answer, detail: Detail) -> Answer:
    """Without the extremes of bins, where there is no room for them."""
    if detail.envelope or not isinstance(answer, Columns):
        return answer
    return Columns(answer.header, {
        name: column for name, column in answer.columns.items()
        if name not in ("low", "high") and not name.endswith(_ENVELOPE)
    })  # fmt: skip


def rounded(answer: Answer, bits: int) -> Answer:
    """Floats with so many bits after the first: what is not seen is not carried.

    >>> rounded(Columns({}, {"x": np.array([1.0009765, np.nan], np.float32)}), 8).columns["x"]
    array([ 1., nan], dtype=float32)
    """
    if not isinstance(answer, Columns):
        return answer
    return Columns(answer.header, {name: _rounded(column, bits) for name, column in answer.columns.items()})


def _rounded(column: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    if column.dtype != np.float32:
        return column
    drop = 23 - bits
    whole = np.ascontiguousarray(column).view(np.uint32)
    cut = ((whole + np.uint32(1 << (drop - 1))) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)).view(np.float32)
    return np.where(np.isfinite(column) & np.isfinite(cut), cut, column).astype(np.float32)


def address(path: str, asked: Mapping[str, str]) -> str:
    """Path and query, keys in order: as the page looks it up.

    >>> address("/api/site", {"width": "200", "site": "a b:output"})
    '/api/site?site=a%20b%3Aoutput&width=200'
    """
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted(asked.items()) if value)
    return f"{path}?{query}" if query else path


def entry(answer: Answer) -> dict[str, str]:
    """An answer as text that cannot end a tag."""
    packed = gzip.compress(encoded(answer), 6, mtime=0)
    kind = "columns" if isinstance(answer, Columns) else "json"
    return {"type": kind, "data": base64.b64encode(packed).decode()}


def _size(entries: Entries) -> int:
    return sum(len(key) + len(made["data"]) + 40 for key, made in entries.items())


def _mapping(answer: Answer) -> Mapping[str, Any]:
    assert not isinstance(answer, Columns)
    return answer
