"""The overview of a run that `show` draws: one row a site, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.record.step import Record
from tensortap.reduce.merge import merge_summaries
from tensortap.reduce.statistics import NONFINITE
from tensortap.sinks.plain import plain, row
from tensortap.store import facts, queries
from tensortap.store.blocks import PerPlace, RowBlock, blocks, read_or_mark, step_array
from tensortap.store.catalog import PLAIN_RECORDS
from tensortap.store.filters import places_matching
from tensortap.store.snapshot import Snapshot
from tensortap.types import Place

TREND: Final = 16  # points in a line over steps
TREND_OF: Final = {"absmax": ("absmax",), "zeros": ("zeros", "numel"), "nan": ("nan", "posinf", "neginf")}
RECENT_STEPS: Final = 256  # as much as can be read again every second, however long the run is

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class NonFiniteEvent(NamedTuple):
    """The first time a site was not finite: its step, and its position in the step."""

    step: int
    seq: int
    site: str


@dataclass(frozen=True, slots=True, eq=False)
class SiteRow:
    """One site at its last step: the statistics of its `of` calls and ranks there, merged."""

    name: str
    record: Record
    of: int
    first_bad: NonFiniteEvent | None
    bad_steps: int
    trend: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """A row for each site, and the facts about the run as a whole, all read from one snapshot.

    `about` is read with the rows: what is drawn later reads no file that may have been sealed meanwhile.
    """

    snapshot: Snapshot
    about: dict[str, Any]
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
            **self.about,
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


def about(snapshot: Snapshot) -> dict[str, Any]:
    """Describe a run in a few plain values."""
    return {
        "path": str(snapshot.files.url),
        "state": snapshot.state,
        "model": model_name(facts.info(snapshot)),
        **({"ended_by": ended_by} if (ended_by := facts.ended_by(snapshot)) else {}),
        "ranks": list(snapshot.ranks),
        "counts": {name: count for name, count in facts.counts(snapshot).items() if count},
    }


def model_name(info: Mapping[str, Any]) -> str:
    """Return the class of the watched model, if the run has it."""
    model = info.get("model")
    if isinstance(model, Mapping):
        model = next((model[key] for key in ("class", "type", "name") if model.get(key)), "")
    return str(model or "")


def overview(
    snapshot: Snapshot, sites: list[str] | None = None, steps: Any = None, trend_of: str = "std",
    phase: str | None = None,
) -> Overview | None:  # fmt: skip
    """Read one row for each site that matches; None when there are no records. No phase means the main one."""
    phase = phase or facts.main_phase(snapshot)
    scan = _scan(snapshot, sites, steps, trend_of, phase)
    if not scan.records:
        return None
    names, order = scan.names_in_order()
    firsts, counts = scan.first_events(names)
    trends = scan.trends()
    last = _last_records(snapshot, sites, dict(zip(names, scan.last_steps().tolist(), strict=True)), phase)
    rows = [
        SiteRow(names[i], *last[names[i]], firsts.get(names[i]), counts[i], trends[i])
        for i in order
        if names[i] in last
    ]
    return Overview(
        snapshot=snapshot,
        about=about(snapshot),
        rows=rows,
        records=scan.records,
        steps=scan.steps[scan.seen].tolist(),
        bad_records=sum(len(place) for place, _, _ in scan.bad),
        first_bad=min(firsts.values(), default=None),
        trend_of=trend_of,
        phase=phase,
    )


def recent_overview(
    snapshot: Snapshot, sites: list[str] | None = None, trend_of: str = "std", most: int = RECENT_STEPS
) -> Overview | None:
    """Read the overview of the last steps; None when there is nothing yet."""
    steps = snapshot.steps
    last = slice(int(steps[-most]), None) if len(steps) > most else None
    return overview(snapshot, sites, last, trend_of)


def site_names(snapshot: Snapshot) -> list[str]:
    """Return every place as `path:port`, in order of execution."""
    return [str(place) for place in snapshot.places]


def calls_note(view: Overview, rows: Sequence[SiteRow]) -> str:
    """Return a sentence about what `×3` in a row means; empty when no row has it."""
    if all(row.of == 1 for row in rows):
        return ""
    each = "calls and ranks" if len(view.snapshot.ranks) > 1 else "calls"
    return f"×N: N {each} in this step; the numbers are of all of them together"


def earlier_steps_note(view: Overview) -> str:
    """Return a sentence about the steps before those in view; empty when there are none."""
    earlier = len(view.snapshot.steps) - len(view.steps)
    last = "step" if len(view.steps) == 1 else f"{len(view.steps)} steps"
    return f"the last {last}; {earlier} earlier ones are not in this view" if earlier > 0 else ""


def _scan(snapshot: Snapshot, sites: list[str] | None, steps: Any, trend_of: str, phase: str | None) -> SiteScan:
    """Read what the rows of the overview are made of, file by file."""
    chosen = _chosen(snapshot, sites)
    columns = [*NONFINITE, *TREND_OF.get(trend_of, (trend_of,))]
    everything = step_array(snapshot, steps)
    scan = SiteScan(snapshot.steps if everything is None else everything)
    if sites is not None or phase is not None:  # they may have been recorded at some steps alone
        for block in blocks(snapshot, (), chosen=chosen, steps=steps, phase=phase):
            scan.see(block)
        scan = SiteScan(scan.steps[scan.seen])
    for block in blocks(snapshot, columns, chosen=chosen, steps=steps, phase=phase):
        scan.add(block, trend_of)
    return scan


class SiteScan:
    """The facts about each site after some blocks of rows. `steps` are the possible steps of rows."""

    def __init__(self, steps: Ints) -> None:
        self.steps = steps
        self.seen = np.zeros(len(steps), bool)
        self.records = 0
        self.bad: list[tuple[Ints, Ints, Ints]] = []  # site, number of the step, position in the step
        self._sites: dict[tuple[str, ...], int] = {}
        self._numbers = PerPlace(lambda place: self._sites.setdefault(place[:3], len(self._sites)), np.int64)
        self._first: dict[int, Ints] = {}  # by rank, of each site: number of its first step, then its position there
        self._last = np.zeros(0, np.int64)
        self._sums = np.zeros(0)
        self._counts = np.zeros(0, np.int64)
        self._spoilt = np.zeros(0, bool)

    def see(self, block: RowBlock) -> Ints:
        """Note which steps there are; return the number of each row's step."""
        step = block.number("step")
        at: Ints = step - self.steps[0]  # steps mostly follow each other
        if self.steps[-1] - self.steps[0] >= len(self.steps) or at.min() < 0 or at.max() >= len(self.steps):
            at = np.searchsorted(self.steps, step)
        self.seen[at] = True
        return at

    def add(self, block: RowBlock, trend_of: str) -> None:
        """Take the rows of a block into account."""
        at, place, seq = self.see(block), self._numbered(block), block.number("seq").astype(np.int64)
        self.records += len(block)
        first = self._first.setdefault(block.source.rank, np.zeros(0, np.int64))
        self._first[block.source.rank] = first = _grown(first, len(self._sites), np.iinfo(np.int64).max)
        np.minimum.at(first, place, at << 32 | seq)
        np.maximum.at(self._last, place, at)
        columns = {name: block.number(name) for name in (*NONFINITE, *TREND_OF.get(trend_of, (trend_of,)))}
        bad = _nonfinite(columns) > 0
        if bad.any():
            self.bad.append((place[bad], at[bad], seq[bad]))
        self._add_trend(place, at, _stat(columns, trend_of), bad)

    def _numbered(self, block: RowBlock) -> Ints:
        numbers = self._numbers.of(block.places)
        count = len(self._sites)
        self._last = _grown(self._last, count, -1)
        self._sums, self._counts = _grown(self._sums, count * TREND, 0), _grown(self._counts, count * TREND, 0)
        self._spoilt = _grown(self._spoilt, count * TREND, False)
        return np.asarray(numbers[block.place])

    def _add_trend(self, place: Ints, at: Ints, values: Floats, bad: npt.NDArray[np.bool_]) -> None:
        stretch = at * TREND // len(self.steps) if len(self.steps) > TREND else at
        bin_of, known = place * TREND + stretch, ~np.isnan(values)
        if not known.all():
            bin_of_known, values = bin_of[known], values[known]
        else:
            bin_of_known = bin_of
        self._counts += np.bincount(bin_of_known, minlength=len(self._counts))
        self._sums += np.bincount(bin_of_known, values, minlength=len(self._sums))
        self._spoilt[bin_of[bad]] = True

    def names_in_order(self) -> tuple[list[str], list[int]]:
        """Return the sites' names, and their order of execution: by position in the first step, on the first rank."""
        names = [str(Place(*site)) for site in self._sites]
        best = np.full(len(names), np.iinfo(np.int64).max)
        for rank in sorted(self._first):
            first = _grown(self._first[rank], len(names), np.iinfo(np.int64).max)
            best = np.where(first >> 32 < best >> 32, first, best)
        return names, np.lexsort((best >> 32, best & 0xFFFFFFFF)).tolist()

    def last_steps(self) -> Ints:
        """Return each site's last step."""
        return self.steps[self._last]

    def first_events(self, names: list[str]) -> tuple[dict[str, NonFiniteEvent], list[int]]:
        """Return for each site when it first was not finite, and in how many steps."""
        if not self.bad:
            return {}, [0] * len(names)
        place, at, seq = (np.concatenate(part) for part in zip(*self.bad, strict=True))
        order = np.lexsort((seq, at))
        which, first = np.unique(place[order], return_index=True)
        firsts = {
            names[site]: NonFiniteEvent(int(self.steps[at[row]]), int(seq[row]), names[site])
            for site, row in zip(which.tolist(), order[first].tolist(), strict=True)
        }
        pairs = np.unique(place * len(self.steps) + at)
        return firsts, np.bincount(pairs // len(self.steps), minlength=len(names)).tolist()

    def trends(self) -> list[list[float]]:
        """Return means over at most TREND stretches of steps; NaN where anything was not finite."""
        mean = self._sums / np.maximum(self._counts, 1)
        mean[self._spoilt] = np.nan
        seen = (self._counts > 0) | self._spoilt
        return [mean[i : i + TREND][seen[i : i + TREND]].tolist() for i in range(0, len(mean), TREND)]


def _grown(array: npt.NDArray[Any], size: int, value: Any) -> npt.NDArray[Any]:
    return np.append(array, np.full(size - len(array), value, array.dtype)) if size > len(array) else array


def _nonfinite(columns: Mapping[str, npt.NDArray[Any]]) -> Floats:
    return np.asarray(np.sum([columns[name] for name in NONFINITE], axis=0), np.float64)


def _stat(columns: Mapping[str, npt.NDArray[Any]], name: str) -> Floats:
    if name == "zeros":
        return np.asarray(columns["zeros"] / np.maximum(columns["numel"], 1))
    if name == "nan":
        return _nonfinite(columns)
    return np.asarray(columns[name], np.float64)


def _last_records(
    snapshot: Snapshot, sites: list[str] | None, at: Mapping[str, int], phase: str | None
) -> dict[str, tuple[Record, int]]:
    """Return each site's records at its last step merged into one, and how many they are."""
    found: dict[str, list[Record]] = {}
    ends = PerPlace(lambda place: at.get(str(place), -1), np.int64)
    for block in blocks(snapshot, (), chosen=_chosen(snapshot, sites), steps=sorted(set(at.values())), phase=phase):
        last = np.flatnonzero(ends.of(block.places)[block.place] == block.number("step"))
        rows = last if block.rows is None else block.rows[last]
        read = functools.partial(block.source.take, rows, PLAIN_RECORDS.names)
        table = read_or_mark(snapshot, block.source, read) if len(rows) else None
        for record in () if table is None else queries.records_in(table):
            found.setdefault(str(record.place), []).append(record)
    for records in found.values():
        records.sort(key=lambda record: (record.rank, record.seq))
    return {name: (_together(records), len(records)) for name, records in found.items()}


def _chosen(snapshot: Snapshot, sites: list[str] | None) -> Callable[[Place], bool]:
    known = None if sites is None else {place[:3] for place in places_matching(sites, snapshot.places)}
    return (lambda place: True) if known is None else (lambda place: place[:3] in known)


def _together(records: list[Record]) -> Record:
    if len(records) == 1:
        return records[0]
    merged = merge_summaries([record.summary for record in records])
    return dataclasses.replace(records[0], summary=merged, numbers={})
