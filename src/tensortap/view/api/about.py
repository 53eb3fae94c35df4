"""Describe runs: the list of them, and one with its places, metrics, counts and cost."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tensortap.errors import RunError, TensortapError
from tensortap.select.ports import PORT_INFO, module_of
from tensortap.store import facts
from tensortap.store.blocks import sources
from tensortap.store.catalog import PLAIN_RECORDS
from tensortap.store.snapshot import Snapshot, Triple
from tensortap.types import Place
from tensortap.view.api.rows import rows_where
from tensortap.view.api.stats import STATS

_ABOUT: Final = ("tensortap", "created", "host", "platform", "python", "argv", "versions", "git")
UNKNOWN: Final = {"calls": 0, "dtype": "", "shape": [], "histogram": False, "tensors": 0}
Facts = Mapping[Triple, Mapping[str, Any]]
_COLUMNS: Final = ("site", "port", "slot", "call", "dtype", "shape", "hist_offset")
_LAST_STEPS: Final = 8  # files of which the last step alone is read, before whole ones are
Fact = dict[str, Any]
Groups = dict[str, list[Triple]]


def listed(ident: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return one line of the list of runs."""
    info = snapshot.run_json
    return {
        "id": ident, "state": shown_state(snapshot), "started": info.get("created"), **_steps(snapshot, flat=True),
        "sites": len(snapshot.rows), "records": snapshot.record_count, "model": model_name(info),
        "ended_by": facts.ended_by(snapshot), "ranks": len(snapshot.ranks),
    }  # fmt: skip


def unreadable(ident: str, error: Exception) -> dict[str, Any]:
    """Return the line of a run that cannot be opened, with the reason."""
    kind = "" if isinstance(error, (TensortapError, OSError)) else f"{type(error).__name__}: "
    nothing = {"started": None, "steps": 0, "first": None, "last": None, "sites": 0, "records": 0, "model": ""}
    return {"id": ident, "state": "unreadable", **nothing, "error": f"{kind}{error}"}


def shown_state(snapshot: Snapshot) -> str:
    """Return the state of a run, or `empty` if nothing was recorded and no process writes any more."""
    return snapshot.state if snapshot.outlines or snapshot.state == "live" else "empty"


def described(
    ident: str, snapshot: Snapshot, metrics: list[str], told: Facts, shown: Snapshot | None = None
) -> dict[str, Any]:  # fmt: skip
    """Return everything the page needs to know of a run before it asks for numbers; `shown` is the chosen phase."""
    shown = shown or snapshot
    info = facts.info(snapshot)
    return {
        "id": ident, "path": str(snapshot.files), "state": shown_state(snapshot), "version": snapshot.version,
        "steps": _steps(shown), "phase": shown.phase, "phases": snapshot.phases,
        "ranks": snapshot.ranks, "sites": _sites(snapshot, told), "metrics": metrics,
        "stats": _stats(snapshot), "labels": {stat.name: stat.label for stat in STATS.values()},
        "records": snapshot.record_count, "counts": facts.counts(snapshot),
        "unseen": info.get("unseen", {}), "cost": _total_cost(snapshot),
        "probes": info.get("probes", []), "ports": [port.as_json() for port in PORT_INFO.values()],
        "model": model_name(info), "ended_by": facts.ended_by(snapshot),
        "about": {name: info[name] for name in _ABOUT if name in info},
    }  # fmt: skip


def _total_cost(snapshot: Snapshot) -> dict[str, Any] | None:
    said = facts.cost(snapshot)
    return None if said is None else {name: said[name] for name in ("share", "seconds", "steps")}


def model_name(info: Any) -> str:
    """Return the model's class, where `run.json` names it."""
    model = info.get("model")
    if not isinstance(model, dict):
        return str(model or "")
    return str(model.get("class", ""))


def _steps(snapshot: Snapshot, flat: bool = False) -> dict[str, Any]:
    first, last = (int(snapshot.steps[0]), int(snapshot.steps[-1])) if len(snapshot.steps) else (None, None)
    return {"steps" if flat else "count": len(snapshot.steps), "first": first, "last": last}


def _stats(snapshot: Snapshot) -> list[str]:
    """Return the statistics that can be asked for."""
    ports = {triple[1] for triple in snapshot.rows}
    return [stat.name for stat in STATS.values() if not stat.ports or ports & set(stat.ports)]


def _sites(snapshot: Snapshot, told: Facts) -> list[dict[str, Any]]:
    types = facts.module_types(snapshot.run_json)
    ops = {(place.site, place.port, place.slot): place.op for place in reversed(snapshot.places)}
    return [
        {
            "i": row, "site": site_name(triple), "path": triple[0], "port": triple[1], "slot": triple[2],
            "op": ops[triple], "type": ops[triple] or types.get(owner(triple), ""), **told.get(triple, UNKNOWN),
        }
        for triple, row in snapshot.rows.items()
    ]  # fmt: skip


def owner(triple: Triple) -> str:
    """Return the module a place belongs to: of a parameter, the one that owns it."""
    return module_of(triple[0], triple[1])


def site_name(triple: Triple) -> str:
    """Return the name of a place on the page."""
    return str(Place(*triple))


def triple_of(snapshot: Snapshot, name: str) -> Triple:
    """Return the place of a name."""
    found = _by_name(snapshot).get(name)
    if found is None:
        raise RunError(f"no site {name!r} in this run")
    return found


def akin(snapshot: Snapshot, place: Triple) -> list[Triple]:
    """Return the other ports of the same module, and its own parameters, in order of execution."""
    by_path, by_owner = _related(snapshot)
    found = {*by_path.get(place[0], ()), *by_owner.get(owner(place), ())} - {place}
    return sorted(found, key=snapshot.rows.__getitem__)


def slots(snapshot: Snapshot, place: Triple) -> list[str]:
    """Return the slots that a module has at a port, in order of execution."""
    return [slot for _, port, slot in _related(snapshot)[0].get(place[0], ()) if port == place[1]]


# A report asks for every site: what is looked up for each is put together once for a snapshot.
_NAMES: weakref.WeakKeyDictionary[Snapshot, dict[str, Triple]] = weakref.WeakKeyDictionary()
_RELATED: weakref.WeakKeyDictionary[Snapshot, tuple[Groups, Groups]] = weakref.WeakKeyDictionary()


def _by_name(snapshot: Snapshot) -> dict[str, Triple]:
    if snapshot not in _NAMES:
        _NAMES[snapshot] = {site_name(triple): triple for triple in reversed(snapshot.rows)}
    return _NAMES[snapshot]


def _related(snapshot: Snapshot) -> tuple[Groups, Groups]:
    if snapshot not in _RELATED:
        by_path, by_owner = Groups(), Groups()
        for triple in snapshot.rows:
            by_path.setdefault(triple[0], []).append(triple)
            by_owner.setdefault(owner(triple), []).append(triple)
        _RELATED[snapshot] = by_path, by_owner
    return _RELATED[snapshot]


def facts_by_place(snapshot: Snapshot) -> dict[Triple, Fact]:
    """Return type, shape, calls and histogram of every place, as of the last record that was found of it."""
    found: dict[Triple, Fact] = {}
    for table in _latest_rows(snapshot, found):
        for triple, fact in _of_table(table).items():
            found.setdefault(triple, fact)
        if len(found) >= len(snapshot.rows):
            break
    return found


def _latest_rows(snapshot: Snapshot, found: dict[Triple, Fact]) -> Iterator[Any]:
    """Yield rows, the latest first: tails, the last steps of some segments, then whatever has unknown places."""
    for table in snapshot.tails.values():
        yield table.select(_COLUMNS).cast(pa.schema([PLAIN_RECORDS.field(name) for name in _COLUMNS]))
    by_name = {source.name: source for source in sources(snapshot)}
    segments = [
        (by_name[name], outline)
        for files in snapshot.records
        for name, outline in files.segments.items()
        if outline.steps and name in by_name
    ]
    segments.sort(key=lambda item: -item[1].steps[-1][1])
    for source, outline in segments[:_LAST_STEPS]:
        yield from rows_where(snapshot, source, "step", {outline.steps[-1][1]}, _COLUMNS)
    for source, outline in segments:
        missing = {str(place[0]) for place in outline.places if tuple(place[:3]) not in found}
        if missing:
            yield from rows_where(snapshot, source, "site", missing, _COLUMNS)


def _of_table(table: Any) -> dict[Triple, Fact]:
    """Return the last row of each place, that of the highest call."""
    histogram = pc.is_valid(table["hist_offset"]).to_pylist()
    found: dict[Triple, Fact] = {}
    for site, port, slot, call, dtype, shape, has in zip(
        *(table[name].to_pylist() for name in _COLUMNS[:-1]), histogram, strict=True
    ):
        calls = max(call + 1, found.get((site, port, slot), {}).get("calls", 0))
        found[site, port, slot] = {"calls": calls, "dtype": dtype, "shape": shape, "histogram": has}
    return found


def cost(snapshot: Snapshot) -> dict[str, Any]:
    """Return seconds and shares, in all and by site, the highest first; null as long as no tap has closed the run."""
    said, counts = facts.cost(snapshot), facts.counts(snapshot)
    by_site = sorted((said or {}).get("by_site", {}).items(), key=lambda item: -item[1])
    whole = sum(seconds for _, seconds in by_site) or 1.0
    return {
        "seconds": None if said is None else said["seconds"],
        "share": None if said is None else said["share"],
        "steps": None if said is None else said["steps"],
        "sites": [{"site": site, "seconds": seconds, "share": seconds / whole} for site, seconds in by_site],
        "thinned": {name: count for name, count in counts.items() if name.startswith("thinned")},
        "counts": counts,
        "unseen": facts.info(snapshot).get("unseen", {}),
    }
