"""A run, opened for reading: live, finished or crashed, local or remote. It never writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.distributed.replicas import NO_REPLICAS, ReplicaGroups, replica_groups
from tensortap.errors import MissingExtraError, RunError, suggest
from tensortap.finding import Findings
from tensortap.record.step import Record
from tensortap.reduce.summary import Summary
from tensortap.store import names as layout
from tensortap.store.catalog import (
    PLAIN_METRICS,
    PLAIN_RECORDS,
    Catalog,
    Outline,
    Sources,
    dataset,
    settled,
    tail_outline,
    tail_table,
)
from tensortap.store.claim import is_locked, read_info
from tensortap.store.files import Files
from tensortap.store.filters import Sites, Steps, all_of, any_place, equal, places_matching, step_filter, step_test
from tensortap.store.merging import Over, fold
from tensortap.store.series import Series, columns_for, series_of
from tensortap.store.tensor_index import Held, Vault
from tensortap.store.tensors import Array, TensorKey
from tensortap.types import COUNTS, STATISTICS, Place

Replicated = Sites | Mapping[str, Sites]
_OF_SUMMARY = ("dtype", "numel", *COUNTS, *STATISTICS)


class Run:
    """What was written, for reading.

    >>> import tensortap as tt                                          # doctest: +SKIP
    >>> run = tt.open("runs/exp1")                                      # doctest: +SKIP
    >>> run.series("blocks.3.mlp", "std")                               # doctest: +SKIP
    """

    diagnose: ClassVar[Callable[..., Findings]]  # set by tensortap.diagnose: rules read runs, runs know no rules
    drawn: ClassVar[Callable[..., str]]  # set by tensortap.view, and so is this:
    plotted: ClassVar[Callable[..., Any]]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.files = Files(path)
        self.path = self.files.url
        self._info = read_info(self.files)
        self._catalog = Catalog(self.files)
        self._vault = Vault(self.files)

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.state}, {len(self.steps)} steps, {len(self.sites)} sites>"

    def _repr_html_(self) -> str:
        return self.drawn(self)

    @property
    def state(self) -> Literal["live", "finished", "crashed"]:
        """Whether it is being written, was closed, or its process is gone without closing it."""
        ranks = self.ranks
        if any(is_locked(self.files.staging() / layout.rank_folder(rank)) for rank in ranks):
            return "live"
        return "finished" if all(s.get("state") == "finished" for s in self._states()) else "crashed"

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json`, and as `unseen` what no rank that looked for it has seen."""
        said = [state["unseen"] for state in self._states() if "unseen" in state]
        if not said:
            return self._info
        seen = set(self.sites) if len(self.ranks) > 1 else set()
        merged = {name: why for names in said for name, why in names.items() if name not in seen}
        return {**self._info, "unseen": merged}

    @property
    def parts(self) -> dict[int, dict[str, dict[str, Any]]]:
        """By rank and place, which part of a tensor the rank holds, where that is known; see docs/ranks.md."""
        return {rank: state.get("parts", {}) for rank, state in zip(self.ranks, self._states(), strict=True)}

    @property
    def ranks(self) -> list[int]:
        """The ranks that took part."""
        return self._catalog.ranks()

    @property
    def places(self) -> list[Place]:
        """Every place seen, in order of execution."""
        first: dict[Place, int] = {}
        for outline in self._outlines():
            for site, port, slot, op, seq, _ in outline.places:
                place = Place(site, port, slot, op)
                first[place] = min(seq, first.get(place, seq))
        return sorted(first, key=lambda place: (first[place], place))

    @property
    def sites(self) -> list[str]:
        """Every place seen as `path:port`, in order of execution."""
        return [str(place) for place in self.places]

    @property
    def steps(self) -> list[int]:
        """The steps that have records, in order."""
        found: set[int] = set()
        for outline in self._outlines():
            for first, last, stride in outline.steps:
                found.update(range(first, last + 1, stride))
        return sorted(found)

    @property
    def lines(self) -> dict[str, str]:
        """For sites of operations, `blocks.3.attn/matmul#1`: the line of the watched code, as `file:line  code`."""
        return {site: line for state in self._states() for site, line in state.get("lines", {}).items()}

    @property
    def last_step(self) -> int:
        """The last step that left anything, be it only a metric or a tensor; −1 when none did."""
        said = [int(state.get("last_step", -1)) for state in self._states()]
        kept = settled(lambda: [held.key.step for held in self._vault.all(self.ranks)])
        found: list[int] = [-1, *said, *kept, *self.steps, *self.metrics()["step"].to_pylist()]
        return max(found)

    @property
    def counts(self) -> dict[str, int]:
        """What was dropped, thinned, skipped or not seen, over all ranks; and what cannot be read any more."""
        total: dict[str, int] = {}
        for state in self._states():
            for name, n in state.get("counts", {}).items():
                total[name] = total.get(name, 0) + n
        settled(self._catalog.records)
        for name, damaged in (("damaged_segments", self._catalog.damaged), ("damaged_tensors", self._vault.damaged)):
            if damaged:
                total[name] = len(damaged)
        return total

    @property
    def cost(self) -> dict[str, Any] | None:
        """What observing cost: seconds, as a share of the step time, and by site; of several ranks the dearest.

        None while the run is written, and when no tap closed it.
        """
        said = [state["cost"] for state in self._states() if state.get("cost")]
        return max(said, key=lambda cost: float(cost["share"])) if said else None

    def table(
        self, sites: Sites = None, ports: str | Sequence[str] | None = None, steps: Steps = None,
        columns: Sequence[str] | None = None,
    ) -> Any:  # fmt: skip
        """The records as a `pyarrow.Table`, by step, rank and order of execution.

        `sites` are patterns as in a probe, `steps` a number, a `(start, stop)` pair, a list or a slice.
        """
        wanted = list(columns) if columns is not None else PLAIN_RECORDS.names
        if unknown := [name for name in wanted if name not in PLAIN_RECORDS.names]:
            raise RunError(f"no column {unknown[0]!r}.{suggest(unknown[0], PLAIN_RECORDS.names)}")
        rows = self._read(self._catalog.records, PLAIN_RECORDS, wanted, self._filter(sites, ports, steps))
        order = [("step", "ascending"), ("rank", "ascending"), ("seq", "ascending")]
        return rows.sort_by(order).select(wanted)

    def records(
        self, sites: Sites = None, ports: str | Sequence[str] | None = None, steps: Steps = None
    ) -> Iterator[Record]:
        """The records one by one."""
        for batch in self.table(sites, ports, steps).to_batches(max_chunksize=4096):
            yield from map(_record, batch.to_pylist())

    def metrics(self) -> Any:
        """The user's metrics as a `pyarrow.Table`: step, rank, name, value, time; a label has a text and no value."""
        rows = self._read(self._catalog.metrics, PLAIN_METRICS, PLAIN_METRICS.names, None)
        return rows.sort_by([("step", "ascending"), ("rank", "ascending")])

    def series(
        self, site: str, stat: str, *, port: str | None = None, slot: str | None = None, call: int | None = None,
        rank: int | None = None,
    ) -> Series:  # fmt: skip
        """One statistic of one site over steps; several calls or ranks of a step are folded into one value.

        `stat` is a column, `nonfinite`, `absmax`, a quantile such as `q0.95`, or a number that a function of yours
        gave.
        """
        place = self._place(site, port, slot)
        copies = [rank for rank, key in self.copies().replicas if key == place[:3]] if rank is None else []
        chosen = all_of(
            [
                ~pc.field("rank").isin(copies) if copies else None,
                equal(place),
                ~pc.field("recomputed"),  # the same tensors once more, for the backward pass
                None if call is None else pc.field("call") == call,
                None if rank is None else pc.field("rank") == rank,
            ]
        )
        wanted = ["step", "rank", "call", "seq", *columns_for(stat)]
        return series_of(self._read(self._catalog.records, PLAIN_RECORDS, wanted, chosen).sort_by("step"), stat)

    def merged(
        self, over: Over | Sequence[Over], sites: Sites = None, steps: Steps = None, replicated: Replicated = None
    ) -> Any:
        """Records folded over ranks, steps or calls: counts exact, moments to rounding, histograms exact.

        Over ranks, copies of one tensor count once where `run.parts` or you, by the patterns in `replicated`, say
        that they are copies: `["embed:output"]` on all ranks, `{"tp": ["embed:output"]}` along one side of the mesh.
        """
        return fold(self.table(sites, steps=steps), over, self.copies(replicated))

    def copies(self, replicated: Replicated = None) -> ReplicaGroups:
        """Which rows are copies of another rank's, by `parts` and by the patterns given; for folding over ranks."""
        if len(self.ranks) < 2:
            return NO_REPLICAS
        places = self.places
        named = replicated if isinstance(replicated, Mapping) else {"": replicated}
        alike = {side: places_matching(of, places) for side, of in named.items() if of is not None}
        return replica_groups(self.parts, places, alike)

    def tensor(
        self, site: str, step: int, *, port: str | None = None, slot: str | None = None, call: int = 0,
        kind: str | None = None, rank: int | None = None, probe: int | None = None,
    ) -> Array:  # fmt: skip
        """What was kept of a tensor at a step: whole, a sample or rows (`kind=` when there are several)."""
        place = self._place(site, port, slot)._replace(op="")
        ranks = self.ranks if rank is None else [rank]
        return settled(lambda: self._vault.one(place, step, call, kind, probe, ranks))

    def tensors(self, sites: Sites = None, steps: Steps = None) -> Iterator[tuple[TensorKey, Array]]:
        """Every kept tensor, by step."""
        chosen = None if sites is None else {p._replace(op="") for p in places_matching(sites, self.places)}
        wanted = step_test(steps)
        for key, read in settled(lambda: list(self._vault.all(self.ranks))):
            if wanted(key.step) and (chosen is None or key.place in chosen):
                try:
                    yield key, read()
                except FileNotFoundError:  # sealed or folded away since it was listed
                    yield key, settled(lambda key=key: self._vault.get(key))  # type: ignore[misc]

    def kept(self, step: int) -> list[Held]:
        """What was kept of tensors at a step, each with how to read it: for choosing among them before reading."""
        return settled(lambda: [h for h in self._vault.all(self.ranks, step) if h.key.step == step])

    def findings(self, rules: Any = None, reference: Any = None) -> Findings:
        """What rules conclude, the worst first: all of them, or those given as names, rules or functions.

        `reference` is a run to hold this one against.
        """
        return self.diagnose(self, rules, reference)

    def plot(self, site: str, **place: Any) -> Any:
        """One site over steps as a figure: of matplotlib where that is installed, else an SVG that notebooks show.

        `port`, `slot`, `call` and `rank` choose as in `series`. A figure is saved with `.savefig("site.png")`.
        """
        return self.plotted(self, site, **place)

    def sql(self, query: str) -> Any:
        """Ask DuckDB about the tables `records` and `metrics`; the answer is a `pyarrow.Table`."""
        try:
            import duckdb
        except ImportError:
            raise MissingExtraError("run.sql() needs DuckDB: pip install 'tensortap[query]'") from None

        def ask() -> Any:
            with duckdb.connect() as connection:
                try:
                    for name, catalog, schema in (
                        ("records", self._catalog.records, PLAIN_RECORDS),
                        ("metrics", self._catalog.metrics, PLAIN_METRICS),
                    ):
                        _register(connection, name, self.files, catalog(), schema)
                    return connection.sql(query).to_arrow_table()
                except duckdb.IOException as error:
                    raise FileNotFoundError(str(error)) from error  # a segment was folded away: look again

        try:
            return settled(ask)
        except (duckdb.Error, FileNotFoundError) as error:
            raise RunError(f"{error}\nThe tables are records ({', '.join(PLAIN_RECORDS.names)}) and metrics "
                           f"({', '.join(PLAIN_METRICS.names)})") from error  # fmt: skip

    def _states(self) -> list[dict[str, Any]]:
        states = []
        for rank in self.ranks:
            try:
                states.append(json.loads(self.files.read(f"{layout.rank_folder(rank)}/{layout.RANK_JSON}")))
            except (OSError, ValueError):
                states.append({})
        return states

    def _outlines(self) -> list[Outline]:
        def look() -> list[Outline]:
            found = self._catalog.records()
            sealed = [outline for sources in found for outline in sources.segments.values()]
            return sealed + [tail_outline(tail_table(sources, PLAIN_RECORDS)) for sources in found]

        return settled(look)

    def _read(self, catalog: Callable[[], list[Sources]], schema: Any, wanted: list[str], chosen: Any) -> Any:
        names = list(dict.fromkeys([*wanted, *(n for n in ("step", "rank", "seq") if n in schema.names)]))
        return settled(lambda: _scan(self._catalog, catalog(), schema, names, chosen))

    def _filter(self, sites: Sites, ports: str | Sequence[str] | None, steps: Steps) -> Any:
        places = None if sites is None else any_place(places_matching(sites, self.places))
        port = None if ports is None else pc.field("port").isin([ports] if isinstance(ports, str) else list(ports))
        return all_of([places, port, step_filter(steps)])

    def _place(self, site: str, port: str | None, slot: str | None) -> Place:
        """The one place a reader means by a site's name."""
        places = self.places
        exact = [p for p in places if str(p) == site or p.site == site]
        fitting = [p for p in exact if (port is None or p.port == port) and (slot is None or p.slot == slot)]
        if not fitting:
            raise RunError(f"no records of {site!r} in {self.path}.{suggest(site, map(str, places))}")
        named = [p for p in fitting if str(p) == site]
        if named or len(fitting) == 1:
            return (named or fitting)[0]
        outputs = [p for p in fitting if p.port == "output" and not p.slot]
        if len(outputs) == 1 and port is None:
            return outputs[0]
        raise RunError(f"{site!r} is several places: say which of {', '.join(map(str, fitting))}")


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder, local or remote, while it is written or afterwards."""
    return Run(path)


def _scan(catalog: Catalog, found: list[Sources], schema: Any, names: list[str], chosen: Any) -> Any:
    """The wanted columns of the rows that pass, from sealed segments and tails together."""
    tables = [tail_table(sources, schema) for sources in found]
    rest = [(table.filter(chosen) if chosen is not None else table).select(names) for table in tables]
    sealed = [name for sources in found for name in sources.segments]

    def read(segments: list[str]) -> Any:
        return dataset(catalog.files, segments, schema).to_table(columns=names, filter=chosen)

    try:
        rest += [read(sealed)] if sealed else []
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException):
        rest += _salvage(catalog, sealed, read)
    return pa.concat_tables(rest or [schema.empty_table().select(names)])


def _salvage(catalog: Catalog, segments: list[str], read: Callable[[list[str]], Any]) -> list[Any]:
    """The segments that can be read, one by one; the others are counted."""
    tables = []
    for name in segments:
        try:
            tables.append(read([name]))
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException):
            catalog.spoil(name)
    return tables


def _register(connection: Any, name: str, files: Files, found: list[Sources], schema: Any) -> None:
    """Make a view of sealed segments, read by DuckDB itself where it can, and tails."""
    tails = pa.concat_tables([tail_table(sources, schema) for sources in found] or [schema.empty_table()])
    connection.register(f"{name}_tail", tails)
    sealed = [segment for sources in found for segment in sources.segments]
    columns = ", ".join(f'"{column}"' for column in schema.names)
    view = f"select {columns} from {name}_tail"
    if sealed and files.local is not None:
        paths = ", ".join("'" + files.path(segment).replace("'", "''") + "'" for segment in sealed)
        source = f"read_parquet([{paths}], hive_partitioning=true, union_by_name=true)"
        view += f" union all by name select * replace (rank::integer as rank) from {source}"
    elif sealed:
        connection.register(f"{name}_sealed", dataset(files, sealed, schema))
        view += f" union all by name select {columns} from {name}_sealed"
    connection.execute(f"create view {name} as {view}")


def _record(row: dict[str, Any]) -> Record:
    known: dict[str, Any] = {name: float("nan") if row[name] is None else row[name] for name in _OF_SUMMARY}
    summary = Summary(
        shape=tuple(row["shape"] or ()),
        hist_offset=row["hist_offset"],
        hist_counts=None if row["hist_counts"] is None else np.array(row["hist_counts"], np.uint32),
        **known,
    )
    return Record(
        place=Place(row["site"], row["port"], row["slot"], row["op"]),
        summary=summary,
        numbers=dict(row["numbers"] or ()),
        time=int(row["time"].timestamp() * 1e6),
        **{name: row[name] for name in ("step", "phase", "rank", "call", "seq", "reason", "recomputed")},
    )
