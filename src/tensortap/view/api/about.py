"""What a run is: the list of runs, and one of them with its places, metrics and counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tensortap.errors import TensortapError
from tensortap.select.ports import PORT_INFO, module_of
from tensortap.view.api.block import Triple
from tensortap.view.api.seen import Seen, Watched
from tensortap.view.api.stats import STATS

_ABOUT: Final = ("tensortap", "created", "host", "platform", "python", "argv", "versions", "git")
UNKNOWN: Final = {"calls": 0, "dtype": "", "shape": [], "histogram": False, "tensors": 0}
Facts = Mapping[Triple, Mapping[str, Any]]


def listed(ident: str, watched: Watched) -> dict[str, Any]:
    """One line of the list of runs."""
    seen, info = watched.look(), watched.run.info
    return {
        "id": ident, "state": seen.state, "started": info.get("created"), **_steps(seen, flat=True),
        "sites": len(seen.row), "records": seen.records, "model": model_name(info),
    }  # fmt: skip


def unreadable(ident: str, error: Exception) -> dict[str, Any]:
    """A run that cannot be opened, and why."""
    kind = "" if isinstance(error, (TensortapError, OSError)) else f"{type(error).__name__}: "
    nothing = {"started": None, "steps": 0, "first": None, "last": None, "sites": 0, "records": 0, "model": ""}
    return {"id": ident, "state": "unreadable", **nothing, "error": f"{kind}{error}"}


def described(ident: str, watched: Watched, seen: Seen, metrics: list[str], facts: Facts) -> dict[str, Any]:
    """Everything the page needs to know of a run before it asks for numbers."""
    run, info = watched.run, watched.run.info
    return {
        "id": ident, "path": run.path, "state": seen.state, "version": seen.version, "steps": _steps(seen),
        "ranks": run.ranks, "sites": _sites(watched, seen, facts), "metrics": metrics, "stats": _stats(seen),
        "records": seen.records, "counts": run.counts, "unseen": info.get("unseen", {}), "cost": cost_of(watched),
        "probes": info.get("probes", []), "ports": [port.as_json() for port in PORT_INFO.values()],
        "model": model_name(info),
        "about": {name: info[name] for name in _ABOUT if name in info},
    }  # fmt: skip


def cost_of(watched: Watched) -> dict[str, Any] | None:
    """What observing cost in all; `None` when the run was not closed by a tap that knew."""
    cost = watched.run.cost
    return None if cost is None else {name: cost[name] for name in ("share", "seconds", "steps")}


def model_name(info: Any) -> str:
    """The model's class, where the run tells."""
    model = info.get("model")
    if not isinstance(model, dict):
        return str(model or "")
    return str(model.get("class", ""))


def _steps(seen: Seen, flat: bool = False) -> dict[str, Any]:
    first, last = (int(seen.steps[0]), int(seen.steps[-1])) if len(seen.steps) else (None, None)
    return {"steps" if flat else "count": len(seen.steps), "first": first, "last": last}


def _stats(seen: Seen) -> list[str]:
    """The statistics that can be asked for."""
    ports = {triple[1] for triple in seen.row}
    return [stat.name for stat in STATS.values() if not stat.ports or ports & set(stat.ports)]


def _sites(watched: Watched, seen: Seen, facts: Facts) -> list[dict[str, Any]]:
    types = module_types(watched.run.info)
    ops = {(place.site, place.port, place.slot): place.op for place in reversed(seen.places)}
    return [
        {
            "i": row, "site": name, "path": triple[0], "port": triple[1], "slot": triple[2], "op": ops[triple],
            "type": ops[triple] or types.get(owner(triple), ""), **facts.get(triple, UNKNOWN),
        }
        for (triple, row), name in zip(seen.row.items(), seen.names, strict=True)
    ]  # fmt: skip


def owner(triple: Triple) -> str:
    """The module a place belongs to: of a parameter, the one it hangs on."""
    return module_of(triple[0], triple[1])


def module_types(info: Any) -> dict[str, str]:
    """The class of each module by its path, where the run tells."""
    model = info.get("model")
    modules = model.get("modules", ()) if isinstance(model, dict) else ()
    return {m["path"]: m.get("type", "") for m in modules if isinstance(m, dict) and "path" in m}
