"""The overview of a run that `show` draws: one row a site, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.record.step import Record
from tensortap.reduce.statistics import NONFINITE
from tensortap.sinks.line import nonfinite
from tensortap.sinks.plain import plain, row
from tensortap.store import facts
from tensortap.store.run import Run

TREND: Final = 16  # points in a line over steps
TREND_OF: Final = {"absmax": ("min", "max"), "zeros": ("zeros", "numel"), "nan": ("nan", "posinf", "neginf")}
RECENT_STEPS: Final = 256  # what can be read again every second, however long the run is
_LIGHT: Final = ("step", "site", "port", "slot", "seq", *NONFINITE)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class NonFiniteEvent(NamedTuple):
    """The first time a site was not finite: its step, and its position in the step."""

    step: int
    seq: int
    site: str


@dataclass(frozen=True, slots=True, eq=False)
class SiteRow:
    """One site at its last step; of its `of` calls and ranks there, the worst."""

    name: str
    record: Record
    of: int
    first_bad: NonFiniteEvent | None
    bad_steps: int
    trend: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """A row for each site, and the facts about the run as a whole."""

    run: Run
    rows: list[SiteRow]
    records: int
    steps: list[int]
    bad_records: int
    first_bad: NonFiniteEvent | None
    trend_of: str
    phase: str | None = None

    def as_json(self, shown: list[SiteRow]) -> dict[str, Any]:
        """Return everything the terminal shows, as plain values."""
        return {
            **about(self.run),
            **({"phase": self.phase} if self.phase else {}),
            "steps": {"count": len(self.steps), "first": self.steps[0], "last": self.steps[-1]},
            "sites": len(self.rows),
            "records": self.records,
            "nonfinite": {"records": self.bad_records, "first": self.first_bad and self.first_bad._asdict()},
            "rows": [self._row(item) for item in shown],
            "hidden": len(self.rows) - len(shown),
        }

    def _row(self, item: SiteRow) -> dict[str, Any]:
        trend = {"stat": self.trend_of, "values": plain(item.trend)}
        first = item.first_bad and item.first_bad.step
        more = {"of": item.of, "first_nonfinite_step": first, "nonfinite_steps": item.bad_steps, "trend": trend}
        return {"name": item.name, **row(item.record), **more}


def about(run: Run) -> dict[str, Any]:
    """Describe a run in a few plain values."""
    return {
        "path": str(run.path),
        "state": run.state,
        "model": model_name(run.info),
        **({"ended_by": ended_by} if (ended_by := run.snapshots.read(facts.ended_by)) else {}),
        "ranks": list(run.ranks),
        "counts": {name: count for name, count in run.counts.items() if count},
    }


def model_name(info: Mapping[str, Any]) -> str:
    """Return the class of the watched model, if the run has it."""
    model = info.get("model")
    if isinstance(model, Mapping):
        model = next((model[key] for key in ("class", "type", "name") if model.get(key)), "")
    return str(model or "")


def overview(
    run: Run, sites: list[str] | None = None, steps: Any = None, trend_of: str = "std", phase: str | None = None
) -> Overview | None:
    """Read one row for each site that matches; None when there are no records."""
    stats = TREND_OF.get(trend_of, (trend_of,))
    table = run.table(sites=sites, steps=steps, columns=list(dict.fromkeys((*_LIGHT, *stats))), phase=phase)
    if not table.num_rows:
        return None
    columns = {name: _numbers(table, name) for name in table.column_names if name not in ("site", "port", "slot")}
    group, names = _groups(table)
    bad = _nonfinite(columns) > 0
    firsts, counts = _first_events(columns, group, bad, names)
    trends = _trends(columns["step"], group, len(names), _stat(columns, trend_of), bad)
    last = _last_records(run, sites, columns["step"], group, names, phase)
    rows = [
        SiteRow(name, *last[name], firsts.get(name), counts[i], trends[i])
        for i, name in enumerate(names)
        if name in last
    ]
    return Overview(
        run=run,
        rows=rows,
        records=table.num_rows,
        steps=np.unique(columns["step"]).tolist(),
        bad_records=int(bad.sum()),
        first_bad=min(firsts.values(), default=None),
        trend_of=trend_of,
        phase=phase,
    )


def recent_overview(
    run: Run, sites: list[str] | None = None, trend_of: str = "std", most: int = RECENT_STEPS
) -> Overview | None:
    """Read the overview of the last steps; None when there is nothing yet."""
    steps = run.steps
    return overview(run, sites, slice(steps[-most], None) if len(steps) > most else None, trend_of, main_phase(run))


def main_phase(run: Run) -> str | None:
    """Return the phase to show unless another is asked for: training, where evaluation is numbered apart."""
    return run.snapshots.read(facts.main_phase)


def earlier_steps_note(run: Run, view: Overview) -> str:
    """Return a sentence about the steps before those in view; empty when there are none."""
    earlier = len(run.steps) - len(view.steps)
    return f"the last {len(view.steps)} steps; {earlier} earlier ones are not in this view" if earlier > 0 else ""


def _numbers(table: Any, name: str) -> npt.NDArray[Any]:
    return np.asarray(table[name].to_numpy())


def _groups(table: Any) -> tuple[Ints, list[str]]:
    """Return a number for each row's site, and the sites' names in order of execution."""
    encoded = [_dictionary(table[name]) for name in ("site", "port", "slot")]
    codes = np.zeros(table.num_rows, np.int64)
    for numbers, values in encoded:
        codes = codes * max(len(values), 1) + numbers
    _, first, group = np.unique(codes, return_index=True, return_inverse=True)
    seq = _numbers(table, "seq")
    order = np.lexsort((first, seq[first]))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    sites, ports, slots = ([values[numbers[i]] for i in first[order]] for numbers, values in encoded)
    return place[group], [f"{s}:{p}{t}" for s, p, t in zip(sites, ports, slots, strict=True)]


def _dictionary(column: Any) -> tuple[Ints, list[str]]:
    array = column.unify_dictionaries().combine_chunks()
    if not hasattr(array, "indices"):
        array = array.dictionary_encode()
    return np.asarray(array.indices.to_numpy(zero_copy_only=False), np.int64), array.dictionary.to_pylist()


def _first_events(
    columns: Mapping[str, npt.NDArray[Any]], group: Ints, bad: npt.NDArray[np.bool_], names: list[str]
) -> tuple[dict[str, NonFiniteEvent], list[int]]:
    """Return for each site when it first was not finite, and in how many steps."""
    rows = np.flatnonzero(bad)
    rows = rows[np.lexsort((columns["seq"][rows], columns["step"][rows]))]
    which, at = np.unique(group[rows], return_index=True)
    firsts = {
        names[g]: NonFiniteEvent(int(columns["step"][r]), int(columns["seq"][r]), names[g])
        for g, r in zip(which.tolist(), rows[at].tolist(), strict=True)
    }
    pairs = np.unique(np.stack([group[rows], columns["step"][rows]]), axis=1)
    return firsts, np.bincount(pairs[0], minlength=len(names)).tolist()


def _nonfinite(columns: Mapping[str, npt.NDArray[Any]]) -> Floats:
    return np.asarray(np.sum([columns[name] for name in NONFINITE], axis=0), np.float64)


def _stat(columns: Mapping[str, npt.NDArray[Any]], name: str) -> Floats:
    if name == "absmax":
        return np.asarray(np.fmax(-columns["min"], columns["max"]))
    if name == "zeros":
        return np.asarray(columns["zeros"] / np.maximum(columns["numel"], 1))
    if name == "nan":
        return _nonfinite(columns)
    return np.asarray(columns[name], np.float64)


def _trends(step: Ints, group: Ints, groups: int, values: Floats, bad: npt.NDArray[np.bool_]) -> list[list[float]]:
    """Return means over at most TREND stretches of steps; NaN where anything was not finite."""
    steps, index = np.unique(step, return_inverse=True)
    stretch = index * TREND // len(steps) if len(steps) > TREND else index
    bin_of, bins = group * TREND + stretch, groups * TREND
    known = ~np.isnan(values)
    count = np.bincount(bin_of[known], minlength=bins)
    mean = np.bincount(bin_of[known], values[known], minlength=bins) / np.maximum(count, 1)
    spoilt = np.bincount(bin_of[bad], minlength=bins) > 0
    mean[spoilt] = np.nan
    seen = (count > 0) | spoilt
    return [mean[i : i + TREND][seen[i : i + TREND]].tolist() for i in range(0, bins, TREND)]


def _last_records(
    run: Run, sites: list[str] | None, step: Ints, group: Ints, names: list[str], phase: str | None
) -> dict[str, tuple[Record, int]]:
    """Return each site's worst record at its last step, and how many it has there."""
    last = np.full(len(names), np.iinfo(np.int64).min)
    np.maximum.at(last, group, step)
    at = dict(zip(names, last.tolist(), strict=True))
    found: dict[str, list[Record]] = {}
    for record in run.records(sites=sites, steps=sorted(set(at.values())), phase=phase):
        name = str(record.place)
        if at.get(name) == record.step:
            found.setdefault(name, []).append(record)
    return {name: (_worst(records), len(records)) for name, records in found.items()}


def _worst(records: Iterable[Record]) -> Record:
    return max(records, key=lambda r: (nonfinite(r.summary), r.summary.zeros / max(r.summary.numel, 1), -r.seq))
