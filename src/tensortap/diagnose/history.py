"""A run as rules see it: each site's history as arrays over steps, read from one snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.diagnose.duplicates import Key, without_duplicates
from tensortap.diagnose.metrics import MetricHistory
from tensortap.diagnose.training import TrainingEvent, prefixed_types, thin_ratios, thin_sites, training_events
from tensortap.finding import Finding, Steps
from tensortap.reduce import histogram as buckets
from tensortap.reduce.statistics import NUMBERS
from tensortap.select.ports import PORT_INFO, module_of
from tensortap.store import facts, queries
from tensortap.store.arrays import array_of
from tensortap.store.blocks import RowBlock, blocks
from tensortap.store.columns import PlaceColumns, SingleRows
from tensortap.store.merging import fold
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot
from tensortap.store.tensor_index import DamagedTensorError, TensorEntry, kept_tensors
from tensortap.types import Place

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
_KEYS: Final = ("step", "rank", "site", "port", "slot", "op", "call", "recomputed")
_ROWS_AT_ONCE: Final = 200_000
LAST: Final = 10  # number of a site's last steps whose histograms and units are read


class SiteHistogram(NamedTuple):
    """The sum of a site's last histograms: the run of buckets, the count of zeros, and the finite extremes."""

    offset: int
    counts: npt.NDArray[np.int64]
    zeros: int
    minimum: float
    maximum: float
    steps: Steps

    @property
    def finite(self) -> int:
        """How many finite elements there were."""
        return int(self.counts.sum()) + self.zeros

    def share(self, low: float, high: float) -> float:
        """Return the share of the finite elements, zeros included, whose magnitude is in [low, high)."""
        inside = buckets.magnitude_share(self.offset, self.counts, low, high) * float(self.counts.sum())
        return (inside + (self.zeros if low <= 0 else 0)) / max(self.finite, 1)

    def magnitude(self, q: float) -> float:
        """Return a quantile of the magnitudes that are not zero; NaN when there are none."""
        top = max(abs(self.minimum), abs(self.maximum))
        folded = (self.offset + np.arange(len(self.counts))) & ~1
        counts = np.bincount(folded, self.counts, buckets.BUCKETS).astype(np.int64)
        return buckets.quantile(q, 0, counts, minimum=0.0, maximum=top) if counts.any() else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class SiteHistory:
    """One place over steps: `site["std"]` is an array, one number a step. Calls and ranks of a step are folded.

    `type` is the module's class (the operation, the parameter's owner), `shape` and `dtype` those of the last step.
    """

    place: Place
    type: str
    dtype: str
    shape: tuple[int, ...]
    steps: npt.NDArray[np.int64]
    columns: Mapping[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def __str__(self) -> str:
        return str(self.place)

    @property
    def floating(self) -> bool:
        """Whether it holds real numbers: not indices, not masks."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def module(self) -> str:
        """The path of the module; for a parameter, that of its module."""
        return module_of(self.place.site, self.place.port)

    @property
    def absmax(self) -> Floats:
        """The largest finite magnitude at each step."""
        return self["absmax"]

    @property
    def zeros(self) -> Floats:
        """The share of zeros at each step."""
        return np.asarray(self["zeros"] / np.maximum(self["numel"], 1))

    @property
    def finite(self) -> Mask:
        """Whether all elements were finite, at each step."""
        return np.asarray(self["nan"] + self["posinf"] + self["neginf"] == 0)

    def finding(
        self, at: Mask | Steps | None, message: str, advice: str = "", *, severity: Any = "", **evidence: Any
    ) -> Finding:
        """Return a finding here, at the steps where the mask holds; the rule adds its name and severity later."""
        when = at if isinstance(at, Steps) or at is None else steps_where(self.steps, at)
        return Finding("", severity, str(self.place), when, evidence, message, advice)


def _has_like(snapshot: Snapshot, port: str) -> bool:
    """Return whether probes recorded a substitute: gradients at another port."""
    recorded = {place.port for place in snapshot.places}
    return PORT_INFO[port].gradient and any(PORT_INFO[other].gradient for other in recorded if other in PORT_INFO)


def steps_where(steps: npt.NDArray[np.int64], mask: Mask) -> Steps | None:
    """Return the span of the steps where a mask holds."""
    held = steps[mask]
    return Steps(int(held[0]), int(held[-1]), len(held)) if len(held) else None


class RunHistory:
    """What was recorded, for rules: sites with their histories, histograms, kept tensors, metrics, the model's modules.

    Everything is read from one snapshot of the run, when it is first asked for; `reference` is another run's history.
    With `only`, a list of steps, rules see those steps alone, except where they ask for others.
    """

    def __init__(
        self, run: Run, reference: RunHistory | None = None, *, snapshot: Snapshot | None = None,
        only: list[int] | None = None,
    ) -> None:  # fmt: skip
        self.run = run
        self.reference = reference
        self.snapshot = run.snapshots.take() if snapshot is None else snapshot
        self.only = only
        self._sites: dict[str, list[SiteHistory]] = {}
        self._keys: dict[Place, Key] = {}
        self._histograms: dict[tuple[str, int], dict[Place, SiteHistogram]] = {}

    @cached_property
    def places(self) -> list[Place]:
        """Every place, in order of execution."""
        return self.snapshot.places

    @cached_property
    def phase(self) -> str | None:
        """The phase that rules look at: training where evaluation has numbers of its own; else None, every step."""
        return facts.main_phase(self.snapshot)

    @cached_property
    def info(self) -> dict[str, Any]:
        """The content of `run.json`, and what was not seen."""
        return facts.info(self.snapshot)

    @cached_property
    def modules(self) -> dict[str, str]:
        """The class of each module by its path, in order of definition, where the run tells.

        Of a script with several models `run.json` describes the first, and without the name that its sites begin with.
        """
        return prefixed_types(self.events("model")) or facts.module_types(self.snapshot.run_json)

    @cached_property
    def metrics(self) -> MetricHistory:
        """The user's metrics by name: steps and values, ranks averaged."""
        return MetricHistory(self.snapshot)

    def of_phase(self, phase: str) -> RunHistory:
        """Return the history of another phase."""
        found = RunHistory(self.run, self.reference, snapshot=self.snapshot, only=self.only)
        found.phase = phase
        return found

    @cached_property
    def _events(self) -> list[TrainingEvent]:
        return training_events(self.snapshot)

    def _thin(self, port: str) -> list[SiteHistory]:
        """Return the parameters and gradients of the training context, if no probe recorded any."""
        return [
            SiteHistory(place, self.modules.get(module_of(place.site, port), ""), "float32", shape, steps, columns)
            for place, shape, steps, columns in thin_sites(self.events("parameters"), port)
        ]

    def events(self, kind: str) -> list[TrainingEvent]:
        """Return the events of a kind, in order; none where the training context was not recorded."""
        return [event for event in self._events if event.kind == kind]

    def table(
        self, ports: str | None = None, steps: list[int] | None = None, columns: Sequence[str] | None = None,
        where: Any = None,
    ) -> Any:  # fmt: skip
        """Return records of one phase as a `pyarrow.Table`, as `run.table` does; `where` is a further filter."""
        chosen = self.only if steps is None else steps
        return queries.table(self.snapshot, ports=ports, steps=chosen, columns=columns, phase=self.phase, where=where)

    def sites(self, *ports: str, duplicates: bool = False) -> list[SiteHistory]:
        """Return the sites at these ports in order of execution, without duplicates of another site's tensor."""
        found = [site for port in ports for site in self._of_port(port)]
        order = {place: i for i, place in enumerate(self.places)}
        found.sort(key=lambda site: order.get(site.place, len(order)))
        return found if duplicates else without_duplicates(found, self._keys)

    def leaves(self, *ports: str) -> list[SiteHistory]:
        """Return the sites of modules that have no modules inside, as far as is known."""
        found = self.sites(*ports, duplicates=True)
        paths = {*self.modules, *(site.module for site in found)}
        inner = {path[:i] for path in paths for i, c in enumerate(path) if c == "."}
        inner |= {""} if len(paths) > 1 else set()
        return [site for site in found if site.module not in inner]

    def histogram(self, site: SiteHistory, last: int = LAST) -> SiteHistogram | None:
        """Return the histograms of a site's last steps together; None when none was kept."""
        key = (site.place.port, last)
        if key not in self._histograms:
            self._histograms[key] = dict(self._read_histograms(*key))
        return self._histograms[key].get(site.place)

    def tensors(
        self, *kinds: str, last: int = 1, steps: Mapping[Place, Collection[int]] | None = None
    ) -> dict[Place, list[tuple[int, npt.NDArray[Any]]]]:  # fmt: skip
        """Return kept tensors, as (step, array), at the last steps of all, or at the last of `steps`."""
        kept: dict[Place, list[TensorEntry]] = {}
        for item in kept_tensors(self.snapshot):
            wanted = steps is None or item.key.step in steps.get(item.key.place, ())
            if wanted and item.key.kind in kinds and not item.key.recomputed:
                kept.setdefault(item.key.place, []).append(item)
        return {place: list(_read(_latest(items, last))) for place, items in kept.items()}

    def numbers(self, port: str, name: str) -> dict[Place, tuple[npt.NDArray[np.int64], Floats]]:
        """Return a named number of each site at a port over steps; the largest, where a step has several."""
        found: dict[Place, list[tuple[npt.NDArray[np.int64], Floats]]] = {}
        for block in _blocks(self, port, ["numbers"]):
            values = array_of(pc.map_lookup(block.columns["numbers"], pa.scalar(name), "first"))
            steps, known = block.number("step"), ~np.isnan(values)
            for i, place in enumerate(block.places):
                mine = known & (block.place == i)
                if mine.any():
                    found.setdefault(place, []).append((steps[mine], values[mine]))
        if not found and (port, name) == ("update", "ratio"):
            return thin_ratios(self.events("parameters"))
        return {place: _largest_by_step(parts) for place, parts in found.items()}

    def _of_port(self, port: str) -> list[SiteHistory]:
        if port not in self._sites:
            self._sites[port] = _SitesAtPort(self, port).read() or (
                [] if _has_like(self.snapshot, port) else self._thin(port)
            )
        return self._sites[port]

    def type_of(self, place: Place) -> str:
        """Return the class of a place's module, or its operation."""
        if place.op:
            return place.op
        return self.modules.get(module_of(place.site, place.port), "")

    def _read_histograms(self, port: str, last: int) -> Iterator[tuple[Place, SiteHistogram]]:
        ends = [site.steps[-last:] for site in self._of_port(port)]
        wanted = np.unique(np.concatenate(ends)).tolist() if ends else []
        table = self.table(ports=port, steps=wanted, columns=[*_KEYS, *NUMBERS, "hist_offset", "hist_counts"])
        rows = _folded(self, table.filter(pc.is_valid(table["hist_counts"])), ("ranks", "calls", "steps"))
        for place, index in _by_place(rows):
            row = rows.slice(int(index[0]), 1).to_pylist()[0]
            if row["min"] is not None and row["hist_counts"] is not None:
                steps = Steps(row["first_step"], row["last_step"], min(row["records"], len(wanted)))
                counts = np.array(row["hist_counts"], np.int64)
                yield place, SiteHistogram(row["hist_offset"], counts, row["zeros"], row["min"], row["max"], steps)


class _SitesAtPort:
    """Read the histories of the sites at one port."""

    def __init__(self, history: RunHistory, port: str) -> None:
        self._history = history
        self._port = port

    def read(self) -> list[SiteHistory]:
        """Return them in the order in which they are found."""
        rows = self._single_rows()
        return list(self._merged_sites() if rows is None else self._plain_sites(rows))

    def _single_rows(self) -> SingleRows | None:
        """Return the rows at a port, where no site has two of them at a step; None where they have to be merged."""
        if len(self._history.snapshot.ranks) > 1:
            return None
        rows = SingleRows(self._history.snapshot, self._history.snapshot.steps)
        for block in _blocks(self._history, self._port, (), recomputed=False):
            rows.add(block)
        return rows if rows.arrange() else None

    def _plain_sites(self, rows: SingleRows) -> Iterator[SiteHistory]:
        """Yield the histories of sites; a column is read when it is first used."""
        ends = sorted({int(rows.steps[part][-1]) for part in rows.parts.values()})
        table = self._history.table(
            ports=self._port, steps=ends, columns=["step", *Place._fields, "recomputed", "dtype", "shape"]
        )
        table = table.filter(pc.invert(table["recomputed"]))
        last = {(Place(*(row[name] for name in Place._fields)), row["step"]): row for row in table.to_pylist()}
        for place, part in rows.parts.items():
            steps = rows.steps[part]
            row = last.get((place, int(steps[-1])), {"dtype": "", "shape": ()})
            yield SiteHistory(
                place,
                self._history.type_of(place),
                row["dtype"],
                tuple(row["shape"] or ()),
                steps,
                PlaceColumns(rows, part),
            )

    def _merged_sites(self) -> Iterator[SiteHistory]:
        """Yield the histories of sites whose calls or ranks are merged, some steps at a time."""
        steps = self._history.snapshot.steps.tolist() if self._history.only is None else self._history.only
        per_step = max(1, self._history.snapshot.record_count // max(len(self._history.snapshot.steps), 1))
        at_once = max(1, _ROWS_AT_ONCE // per_step)
        parts = []
        for start in range(0, len(steps), at_once):
            chosen = steps[start : start + at_once]
            table = self._history.table(ports=self._port, steps=chosen, columns=[*_KEYS, "dtype", "shape", *NUMBERS])
            parts.append(_folded(self._history, table, ("ranks", "calls")))
        if parts:
            yield from self._split(pa.concat_tables(parts))

    def _split(self, rows: Any) -> Iterator[SiteHistory]:
        columns = {name: np.asarray(rows[name].to_numpy(zero_copy_only=False), np.float64) for name in NUMBERS}
        steps = rows["step"].to_numpy()
        for place, index in _by_place(rows):
            index = index[np.argsort(steps[index], kind="stable")]
            end = int(index[-1])
            yield SiteHistory(
                place, self._history.type_of(place), rows["dtype"][end].as_py(),
                tuple(rows["shape"][end].as_py() or ()), steps[index],
                {name: column[index] for name, column in columns.items()},
            )  # fmt: skip


def _blocks(
    history: RunHistory, port: str, columns: Sequence[str], recomputed: bool = True
) -> Iterator[RowBlock]:  # fmt: skip
    return blocks(
        history.snapshot, columns, chosen=lambda place: place.port == port, steps=history.only, phase=history.phase,
        recomputed=recomputed,
    )  # fmt: skip


def _folded(history: RunHistory, table: Any, over: Iterable[Any]) -> Any:
    table = table.filter(pc.invert(table["recomputed"]))  # the same tensors once more, for the backward pass
    return fold(table, list(over), queries.replicas(history.snapshot))


def _largest_by_step(
    parts: Sequence[tuple[npt.NDArray[np.int64], Floats]],
) -> tuple[npt.NDArray[np.int64], Floats]:
    steps, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(steps, kind="stable")
    unique, starts = np.unique(steps[order], return_index=True)
    return unique, np.maximum.reduceat(values[order], starts)


def _read(items: Iterable[TensorEntry]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    for item in items:
        with contextlib.suppress(DamagedTensorError):  # it is counted with the run
            yield item.key.step, item.read()


def _latest(items: list[TensorEntry], last: int) -> list[TensorEntry]:
    steps = sorted({item.key.step for item in items})[-last:]
    return [item for item in items if item.key.step in steps]


def _by_place(rows: Any) -> Iterator[tuple[Place, npt.NDArray[np.int64]]]:
    """Yield the rows of each place."""
    code = np.zeros(len(rows), np.int64)
    for name in Place._fields:
        words = pc.dictionary_encode(rows[name].combine_chunks())
        words = words.combine_chunks() if isinstance(words, pa.ChunkedArray) else words
        code = np.unique(code * max(len(words.dictionary), 1) + words.indices.to_numpy(), return_inverse=True)[1]
    order = np.argsort(code, kind="stable")
    for index in np.split(order, np.flatnonzero(np.diff(code[order])) + 1) if len(rows) else ():
        yield Place(*(rows[name][int(index[0])].as_py() for name in Place._fields)), index
