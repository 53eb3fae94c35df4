"""Read rows from one snapshot of a run: tables, series, rows merged over ranks, SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tensortap.distributed.replicas import NO_REPLICAS, ReplicaGroups, replica_groups
from tensortap.errors import MissingExtraError, RunError, suggest
from tensortap.record.step import Record
from tensortap.reduce.statistics import NUMBERS, with_sources
from tensortap.reduce.summary import Summary
from tensortap.store.arrays import empty_table
from tensortap.store.blocks import blocks
from tensortap.store.catalog import (
    PLAIN_EVENTS,
    PLAIN_METRICS,
    PLAIN_RECORDS,
    Outline,
    RankFiles,
    dataset,
    derive_missing,
    plain_rows,
    tail_outline,
)
from tensortap.store.filters import (
    SiteSelection,
    StepSelection,
    all_of,
    any_place,
    equal,
    places_matching,
    step_filter,
    step_test,
)
from tensortap.store.names import rank_of
from tensortap.store.series import Series, columns_for, series_of
from tensortap.store.snapshot import Snapshot
from tensortap.store.tail_reader import possible_rows
from tensortap.types import Place

Replicated = SiteSelection | Mapping[str, SiteSelection]
_OF_SUMMARY: Final = ("dtype", *NUMBERS)
_OF_RECORD: Final = ("step", "phase", "rank", "call", "seq", "reason", "recomputed", "time")


def table(
    snapshot: Snapshot, sites: SiteSelection = None, ports: str | Sequence[str] | None = None,
    steps: StepSelection = None, columns: Sequence[str] | None = None, phase: str | None = None, where: Any = None,
) -> Any:  # fmt: skip
    """Return the records as a `pyarrow.Table`, by step, rank and order of execution.

    `where` is a further filter, a `pyarrow.compute.Expression`.
    """
    wanted = list(columns) if columns is not None else PLAIN_RECORDS.names
    if unknown := [name for name in wanted if name not in PLAIN_RECORDS.names]:
        raise RunError(f"no column {unknown[0]!r}.{suggest(unknown[0], PLAIN_RECORDS.names)}")
    chosen = all_of([_filter(snapshot, sites, ports, steps, phase), where])
    rows = _read(snapshot, with_steps(snapshot, steps), PLAIN_RECORDS, wanted, chosen)
    order = [("step", "ascending"), ("rank", "ascending"), ("seq", "ascending")]
    return rows.sort_by(order).select(wanted)


def step_rows(
    snapshot: Snapshot, columns: Sequence[str], step: int, phase: str = "",
    chosen: Callable[[Place], bool] = lambda place: True,
) -> Any:  # fmt: skip
    """Return columns of one step's rows in the plain schema, by rank and order of execution.

    As `table` does, without Arrow's data sets and expressions: those import pandas, which takes half a second. A
    statistic without a value is NaN.
    """
    names = list(dict.fromkeys((*columns, "rank", "seq")))
    found = [block.table(names) for block in blocks(snapshot, columns, chosen=chosen, steps=step, phase=phase or None)]
    rows = pa.concat_tables(found) if found else empty_table(pa.schema([PLAIN_RECORDS.field(name) for name in names]))
    return rows.sort_by([("rank", "ascending"), ("seq", "ascending")]).select(list(columns))


def with_steps(snapshot: Snapshot, steps: StepSelection) -> list[RankFiles]:
    """Return the files of records without the segments that have none of the steps: they are not even opened."""
    if steps is None:
        return snapshot.records
    test = step_test(steps)
    wanted = np.array([step for step in snapshot.steps.tolist() if test(step)], np.int64)

    def has(outline: Outline) -> bool:
        ranges = np.array(outline.steps or [(0, -1, 1)], np.int64)
        return bool((np.searchsorted(wanted, ranges[:, 0]) < np.searchsorted(wanted, ranges[:, 1], "right")).any())

    return [
        files._replace(segments={name: outline for name, outline in files.segments.items() if has(outline)})
        for files in snapshot.records
    ]


def records_in(rows: Any) -> Iterator[Record]:
    """Return the rows of a table as records, one by one."""
    # As numbers: the first date that Arrow makes of a timestamp imports pandas, which takes a quarter of a second.
    rows = rows.set_column(rows.column_names.index("time"), "time", rows["time"].cast(pa.int64()))
    for batch in rows.to_batches(max_chunksize=4096):
        yield from map(record_of, batch.to_pylist())


def metrics(snapshot: Snapshot) -> Any:
    """Return the user's metrics as a `pyarrow.Table`; a label has a text and no value."""
    rows = _read(snapshot, snapshot.metrics, PLAIN_METRICS, PLAIN_METRICS.names, None)
    return rows.sort_by([("step", "ascending"), ("rank", "ascending")])


def events(snapshot: Snapshot) -> Any:
    """Return the events of the training as a `pyarrow.Table`; `data` is a JSON object."""
    rows = _read(snapshot, snapshot.events, PLAIN_EVENTS, PLAIN_EVENTS.names, None)
    return rows.sort_by([("rank", "ascending"), ("time", "ascending")])


def series(
    snapshot: Snapshot, place: Place, stat: str, call: int | None, rank: int | None, phase: str | None = None
) -> Series:
    """Return one statistic of one place over steps; calls and ranks of a step are merged into one value."""
    copies = [of for of, key in replicas(snapshot).replicas if key == place[:3]] if rank is None else []
    chosen = all_of(
        [
            ~pc.field("rank").isin(copies) if copies else None,
            equal(place),
            ~pc.field("recomputed"),  # the same tensors once more, for the backward pass
            None if call is None else pc.field("call") == call,
            None if rank is None else pc.field("rank") == rank,
            None if phase is None else pc.field("phase") == phase,
        ]
    )
    wanted = ["step", "phase", "rank", "call", "seq", *columns_for(stat)]
    rows = one_phase(_read(snapshot, snapshot.records, PLAIN_RECORDS, wanted, chosen))
    return series_of(rows.sort_by("step"), stat)


def one_phase(rows: Any) -> Any:
    """Return the rows of training alone where steps of training and of evaluation share numbers; else all rows."""
    both = [pc.unique(rows["step"].filter(pc.equal(rows["phase"], phase))) for phase in ("train", "eval")]
    if not len(both[0]) or not len(both[1]) or not pc.any(pc.is_in(both[0], both[1])).as_py():
        return rows
    return rows.filter(pc.not_equal(rows["phase"], "eval"))


def shards(snapshot: Snapshot) -> dict[int, dict[str, dict[str, Any]]]:
    """Return which part of a tensor a rank holds, by rank and place, where that is known."""
    return {rank: state.get("parts", {}) for rank, state in zip(snapshot.ranks, snapshot.rank_states, strict=True)}


def replicas(snapshot: Snapshot, replicated: Replicated = None) -> ReplicaGroups:
    """Return which rows are copies of another rank's, by what ranks said and by the patterns given."""
    if len(snapshot.ranks) < 2:
        return NO_REPLICAS
    named = replicated if isinstance(replicated, Mapping) else {"": replicated}
    alike = {side: places_matching(of, snapshot.places) for side, of in named.items() if of is not None}
    return replica_groups(_shards_with_rows(snapshot), snapshot.places, alike)


def _shards_with_rows(snapshot: Snapshot) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the shards that have rows: if a rank's files are gone, its replicas count instead."""
    said = shards(snapshot)
    present: dict[int, set[str]] = {files.rank: set() for files in snapshot.records}
    for files in snapshot.records:
        tails = [snapshot.tails[path] for path in files.tails if path in snapshot.tails]
        outlines = [*files.segments.values(), *map(tail_outline, tails)]
        for places in {id(outline.places): outline.places for outline in outlines}.values():
            present[files.rank].update(str(Place(site, port, slot)) for site, port, slot, *_ in places)
    return {
        rank: {name: shard for name, shard in said[rank].items() if name in names}
        for rank, names in present.items()
        if names
    }


def place_named(snapshot: Snapshot, site: str, port: str | None, slot: str | None) -> Place:
    """Return the one place a reader means by a site's name."""
    places = snapshot.places
    exact = [p for p in places if str(p) == site or p.site == site]
    fitting = [p for p in exact if (port is None or p.port == port) and (slot is None or p.slot == slot)]
    if not fitting:
        names = [*map(str, places), *(p.site for p in places)]
        raise RunError(f"no records of {site!r} in {snapshot.files}.{suggest(site, names)}")
    named = [p for p in fitting if str(p) == site]
    if named or len(fitting) == 1:
        return (named or fitting)[0]
    outputs = [p for p in fitting if p.port == "output" and not p.slot]
    if len(outputs) == 1 and port is None:
        return outputs[0]
    raise RunError(f"{site!r} is several places: say which of {', '.join(map(str, fitting))}")


def sql(snapshot: Snapshot, query: str) -> Any:
    """Ask DuckDB about the tables `records`, `metrics` and `events`; return a `pyarrow.Table`."""
    with database(snapshot) as connection:
        return connection.sql(query).to_arrow_table()


@contextmanager
def database(snapshot: Snapshot) -> Iterator[Any]:
    """Yield a connection of DuckDB with the views `records`, `metrics` and `events`; its errors become ours."""
    try:
        import duckdb
    except ImportError:
        raise MissingExtraError("run.sql() needs DuckDB: pip install 'tensortap[query]'") from None
    with duckdb.connect() as connection:
        try:
            _register(connection, "records", snapshot, snapshot.records, PLAIN_RECORDS)
            _register(connection, "metrics", snapshot, snapshot.metrics, PLAIN_METRICS)
            _register(connection, "events", snapshot, snapshot.events, PLAIN_EVENTS)
            yield connection
        except duckdb.IOException as error:
            raise FileNotFoundError(str(error)) from error  # a segment was compacted away: read again
        except duckdb.Error as error:
            raise RunError(_sql_help(error)) from error


def _sql_help(error: Exception) -> str:
    tables = {"records": PLAIN_RECORDS, "metrics": PLAIN_METRICS, "events": PLAIN_EVENTS}
    named = [f"{name} ({', '.join(schema.names)})" for name, schema in tables.items()]
    return f"{error}\nThe tables are {', '.join(named[:-1])} and {named[-1]}"


def _filter(
    snapshot: Snapshot, sites: SiteSelection, ports: str | Sequence[str] | None, steps: StepSelection,
    phase: str | None = None,
) -> Any:  # fmt: skip
    places = None if sites is None else any_place(places_matching(sites, snapshot.places))
    port = None if ports is None else pc.field("port").isin([ports] if isinstance(ports, str) else list(ports))
    return all_of([places, port, step_filter(steps), None if phase is None else pc.field("phase") == phase])


def _read(snapshot: Snapshot, found: list[RankFiles], schema: Any, wanted: list[str], chosen: Any) -> Any:
    """Return the wanted columns of the rows that pass, from sealed segments and tails together."""
    names = list(dict.fromkeys([*wanted, *(n for n in ("step", "rank", "seq") if n in schema.names)]))
    tails = snapshot.tail_rows(found, schema)
    rest = [derive_missing(rows.filter(chosen) if chosen is not None else rows, names) for rows in tails]
    sealed = [name for files in found for name in files.segments]
    rest += sealed_rows(snapshot, sealed, schema, names, chosen)
    return _with_keys(snapshot, pa.concat_tables(rest or [empty_table(schema).select(names)]), sealed)


def sealed_rows(
    snapshot: Snapshot, segments: list[str], schema: Any, columns: Sequence[str], chosen: Any = None
) -> list[Any]:  # fmt: skip
    """Return columns of the rows of segments that pass, in tables; a segment that cannot be read is counted."""

    def read(names: list[str]) -> Any:
        if schema is not PLAIN_RECORDS and chosen is None:
            return pa.concat_tables([_whole_segment(snapshot, name, schema) for name in names]).select(list(columns))
        found = dataset(snapshot.files, names, schema).to_table(columns=with_sources(columns), filter=chosen)
        return derive_missing(found, columns)

    try:
        return [read(segments)] if segments else []
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException):
        return _salvage(snapshot, segments, read)


def _whole_segment(snapshot: Snapshot, name: str, schema: Any) -> Any:
    """Return all rows of a segment of metrics or events: they are few, and Arrow's data sets would import pandas."""
    with snapshot.files.open(name) as source, pq.ParquetFile(source, page_checksum_verification=True) as file:
        rows = file.read(use_threads=False)
    rank = rank_of(name.split("/")[-2])
    return plain_rows(rows, 0 if rank is None else rank, schema)


def _with_keys(snapshot: Snapshot, rows: Any, sealed: list[str]) -> Any:
    """Return the rows that have a place, a step and a time: only a damaged file has others."""
    possible = possible_rows(rows, ("step", "seq", "site", "port", "slot", "op", "name", "time"))
    if len(possible) < len(rows) and sealed:
        snapshot.catalog.damage.setdefault(sealed[0], "some rows have no place, no step or no time")
    return possible


def _salvage(snapshot: Snapshot, segments: list[str], read: Callable[[list[str]], Any]) -> list[Any]:
    """Return the segments that can be read, one by one; the others are counted."""
    tables = []
    for name in segments:
        try:
            tables.append(read([name]))
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            snapshot.catalog.mark_damaged(name, error)
    return tables


def _register(connection: Any, name: str, snapshot: Snapshot, found: list[RankFiles], schema: Any) -> None:
    """Make a view of sealed segments, read by DuckDB itself where it can, and tails."""
    tails = snapshot.tail_rows(found, schema)
    connection.register(f"{name}_tail", pa.concat_tables(tails) if tails else empty_table(schema))
    sealed = [segment for files in found for segment in files.segments]
    columns = ", ".join(f'"{column}"' for column in schema.names)
    view = f"select {columns} from {name}_tail"
    if sealed and snapshot.files.local is not None:
        paths = ", ".join("'" + snapshot.files.path(segment).replace("'", "''") + "'" for segment in sealed)
        source = f"read_parquet([{paths}], hive_partitioning=true, union_by_name=true)"
        view += f" union all by name select * replace (rank::integer as rank) from {source}"
    elif sealed:
        connection.register(f"{name}_sealed", dataset(snapshot.files, sealed, schema))
        view += f" union all by name select {columns} from {name}_sealed"
    connection.execute(f"create view {name} as {view}")


def record_of(row: Mapping[str, Any]) -> Record:
    """Return a row as a record; what was not read is None, of a statistic NaN."""
    known: dict[str, Any] = {name: float("nan") if row.get(name) is None else row[name] for name in _OF_SUMMARY}
    summary = Summary(
        shape=tuple(row["shape"] or ()),
        hash=row["hash"],
        hist_offset=None if (counts := _counts(row)) is None else row["hist_offset"],
        hist_counts=counts,
        **known,
    )
    keys: dict[str, Any] = {name: row.get(name) for name in _OF_RECORD}
    return Record(
        place=Place(row["site"], row["port"], row["slot"], row["op"]),
        summary=summary,
        numbers=dict(row.get("numbers") or ()),
        **keys,
    )


def _counts(row: Mapping[str, Any]) -> Any:
    """Return the counts of a row's histogram; None where there is none, or a damaged file holds something else."""
    if row.get("hist_counts") is None or row["hist_offset"] is None:
        return None
    try:
        return np.array(row["hist_counts"], np.uint32)
    except (OverflowError, TypeError, ValueError):
        return None
