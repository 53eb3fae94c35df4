"""List the files of a run: sealed segments, tails that are not sealed yet, and files of tensors."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tensortap.reduce.statistics import BY_NAME, COUNTS
from tensortap.store import names as layout
from tensortap.store.files import Files, check_original, check_regular, load_json
from tensortap.store.footer import check_footer, check_row_counts, zero_columns
from tensortap.store.schema import EVENTS, FILE_COUNTS, METRICS, RECORDS
from tensortap.store.segments import (
    BY_PLACE,
    COLUMNS,
    FILE,
    ORDER,
    PLACE,
    PLACES,
    REPLACES,
    STEPS,
    UNREADABLE,
    outline,
)

_RANK: Final = pa.field("rank", pa.int32())
MOSTLY_ZERO: Final = (*COUNTS, "recomputed")
Steps = npt.NDArray[np.int64]


def _plain(schema: Any) -> Any:
    """Return the same columns as files have them, and the rank that the folder's name gives."""
    fields = [pa.field(f.name, _file_type(f), metadata=f.metadata) for f in schema]
    return pa.schema([*fields[:2], _RANK, *fields[2:]])


def _file_type(field: Any) -> Any:
    if field.name == "hist_counts":
        return FILE_COUNTS
    return field.type.value_type if pa.types.is_dictionary(field.type) else field.type


PLAIN_RECORDS: Final = _plain(RECORDS)
PLAIN_METRICS: Final = _plain(METRICS)
PLAIN_EVENTS: Final = _plain(EVENTS)


class Outline(NamedTuple):
    """The content of a segment's footer.

    A place comes with its first sequence number and its row count; steps are (first, last, stride) ranges. Where there
    are more than two phases, only the first and the last by name are known without reading rows. `by_place`: rows are
    sorted by place, and those of every (site, port, slot) are its steps, in order, once.
    """

    places: list[tuple[str, str, str, str, int, int]]
    steps: list[tuple[int, int, int]]
    rows: int
    replaces: frozenset[str]
    phases: frozenset[str] = frozenset()
    order: tuple[int, ...] = ()  # the places of each step's rows, where every step has the same in the same order
    written_as: str = ""  # the name of its file in the run when it was written; older files do not tell
    ident: str = ""  # the id in that name
    by_place: bool = False
    zero: frozenset[str] = frozenset()  # columns, of those that mostly are zero, that are so in every row


class RankFiles(NamedTuple):
    """The files of one rank that hold rows of one kind, and those whose rows another file holds already."""

    rank: int
    segments: dict[str, Outline]
    tails: list[Path]
    old_segments: list[str]
    old_tails: list[Path]


class TensorFiles(NamedTuple):
    """The files of one rank that hold tensors: sealed ones by name, tails to seal, and tails sealed already."""

    rank: int
    names: list[str]
    tails: list[Path]
    old_tails: list[Path]


class Catalog:
    """List a run's files, remember the footers that were read, and count what cannot be read."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.damage: dict[str, str] = {}  # what is wrong, by the name of the file
        self._unreadable: set[str] = set()
        self._outlines: dict[str, Outline] = {}
        self._phases: dict[str, dict[str, Steps]] = {}
        self._lock = threading.Lock()

    def ranks(self) -> list[int]:
        """Return the ranks that have written something: records, or metrics alone, if the records were deleted."""
        names = {*self.files.list(), *self.files.list(layout.METRICS)}
        if layout.DAMAGED_RUN_JSON in names:
            self.mark_damaged(layout.DAMAGED_RUN_JSON, "so run.json was when the run was resumed")
        names |= {p.name for p in self.files.staging().glob("rank=*")}
        return sorted(rank for name in names if (rank := layout.rank_of(name)) is not None)

    def records(self, rank: int) -> RankFiles:
        """Return the files that hold a rank's records."""
        return self._rows(rank, layout.rank_folder(rank))

    def metrics(self, rank: int) -> RankFiles:
        """Return the files that hold a rank's metrics."""
        return self._rows(rank, layout.metrics_folder(rank))

    def events(self, rank: int) -> RankFiles:
        """Return the files that hold a rank's events."""
        return self._rows(rank, layout.events_folder(rank))

    def tensors(self, rank: int) -> TensorFiles:
        """Return the files that hold a rank's tensors."""
        folder = layout.tensors_folder(rank)
        tails = self._tails(folder)  # before the sealed ones, as in `_rows`
        names = [name for name in self.files.list(folder) if layout.tensor_file(name)]
        self._note_kept_aside(folder)
        sealed = {layout.tensors_id(name) for name in names}
        rest = sorted(path for path, ident in tails.items() if ident not in sealed)
        old = sorted(path for path, ident in tails.items() if ident in sealed)
        return TensorFiles(rank, [f"{folder}/{name}" for name in names], rest, old)

    def steps_by_phase(self, name: str, found: Outline) -> dict[str, Steps]:
        """Return the steps of each phase that a segment holds; its rows are read only if they are of several phases."""
        if len(found.phases) < 2:
            return {next(iter(found.phases), "") or "": expanded(found.steps)}
        if name not in self._phases:
            self._phases[name] = self._steps_by_phase(name)
        return self._phases[name]

    def _steps_by_phase(self, name: str) -> dict[str, Steps]:
        try:
            with self.files.open(name) as source, pq.ParquetFile(source, page_checksum_verification=True) as file:
                return steps_by_phase(file.read(["step", "phase"]))
        except FileNotFoundError:
            raise
        except UNREADABLE as error:
            self.mark_damaged(name, error)
            return {}

    def mark_damaged(self, name: str | Path, reason: object) -> None:
        """Remember that a file cannot be read, or not all of it, and why; a segment is left out from now on."""
        if isinstance(name, Path):
            name = str(name.relative_to(self.files.staging()))
        self._unreadable.add(name)
        self.damage.setdefault(name, str(reason) or type(reason).__name__)

    def _rows(self, rank: int, folder: str) -> RankFiles:
        """List one folder. Raises FileNotFoundError when a file goes away meanwhile: read again (`retry_if_moved`)."""
        # Tails are listed first: one that is sealed meanwhile is then seen as a segment, never missed.
        tails = self._tails(folder)
        names = [f"{folder}/{name}" for name in self.files.list(folder) if layout.segment_id(name)]
        self._note_kept_aside(folder)
        whole = self._outlines_of(names)
        gone = self._replaced(whole)
        sealed = {found.ident for found in whole.values()} | gone
        return RankFiles(
            rank,
            {name: found for name, found in whole.items() if found.ident not in gone},
            sorted(path for path, ident in tails.items() if ident not in sealed),
            [name for name, found in whole.items() if found.ident in gone],
            sorted(path for path, ident in tails.items() if ident in sealed),
        )

    def _outlines_of(self, names: Sequence[str]) -> dict[str, Outline]:
        """Return the footers of a folder's readable segments; one entry if a segment has several copies."""
        whole: dict[str, Outline] = {}
        known: dict[str, str] = {}
        for name in names:
            found = self._outline(name)
            if found is not None and known.setdefault(found.ident, name) == name:
                whole[name] = found
            elif found is not None:
                self.mark_damaged(name, f"it is a copy of {known[found.ident]}")
        return whole

    def _replaced(self, segments: Mapping[str, Outline]) -> frozenset[str]:
        """Return the ids of segments that others replace; a claim to replace more rows than it has is ignored."""
        rows = {found.ident: found.rows for found in segments.values()}
        gone: set[str] = set()
        for name, found in segments.items():
            named = found.replaces - {found.ident}
            if sum(rows.get(ident, 0) for ident in named) <= found.rows:
                gone |= named
            else:
                self.damage.setdefault(name, "it says that it replaces more rows than it has")
        return frozenset(gone)

    def _tails(self, folder: str) -> dict[Path, str | None]:
        found = (self.files.staging() / folder).glob("_tail-*.arrows")
        return {path: ident for path in found if (ident := layout.tail_id(path.name)) and self._may_be_read(path)}

    def _may_be_read(self, path: Path) -> bool:
        try:
            check_regular(path, self.files.staging())
        except FileNotFoundError:
            return False
        except OSError as error:
            self.mark_damaged(path, error)
            return False
        return True

    def _note_kept_aside(self, folder: str) -> None:
        """Count the tails that sealing could not read to their end, and kept."""
        for path in (self.files.staging() / folder).glob(f"_tail-*.arrows{layout.DAMAGED}"):
            self.mark_damaged(path, "it could not be read to its end; what could be read was sealed")

    def _outline(self, name: str) -> Outline | None:
        with self._lock:
            if name in self._outlines:
                return None if name in self._unreadable else self._outlines[name]
        try:
            with self.files.open(name) as file:
                found = _parsed(file)
            check_original(self.files, name, found.written_as)
        except FileNotFoundError:
            raise
        except UNREADABLE as error:
            self.mark_damaged(name, error)
            return None
        found = found._replace(ident=_ident(found.written_as) or _ident(name) or "")
        with self._lock:
            self._outlines[name] = found
        return found


def _ident(name: str) -> str | None:
    return layout.segment_id(name.rpartition("/")[2])


def _parsed(source: IO[bytes]) -> Outline:
    check_footer(source)
    file = pq.ParquetFile(source)
    check_row_counts(file.metadata)
    said, rows = file.metadata.metadata or {}, file.metadata.num_rows
    if COLUMNS in said and load_json(said[COLUMNS]) != file.schema_arrow.names:
        raise ValueError("its footer names other columns than were written")
    replaces = load_json(said.get(REPLACES, b"[]"))
    names = frozenset(replaces) if all(isinstance(name, str) for name in replaces) else frozenset[str]()
    written_as = said.get(FILE, b"").decode()
    try:
        steps = _steps(said.get(STEPS, b"[]"), rows)
        places = _places(said.get(PLACES, b"[]"))
        order = _order(said.get(ORDER, b"[]"), len(places), rows, steps)
        by_place = said.get(BY_PLACE) == b"true" and _has_every_step(places, steps)
        zero = frozenset(zero_columns(file.metadata, MOSTLY_ZERO))
        return Outline(places, steps, rows, names, _phases(file), order, written_as, by_place=by_place, zero=zero)
    except (ValueError, TypeError):  # what it says of itself is damaged, perhaps not its rows
        columns = [name for name in ("step", "seq", *PLACE) if name in file.schema_arrow.names]
        return tail_outline(file.read(columns))._replace(rows=rows, replaces=names, written_as=written_as)


def _steps(said: bytes, rows: int) -> list[tuple[int, int, int]]:
    """Parse a footer's ranges of steps; there are no more steps than rows, whatever it says."""
    ranges = [tuple(found) for found in load_json(said)]
    for first, last, stride in ranges:
        if not all(type(n) is int for n in (first, last, stride)) or stride < 1 or not 0 <= first <= last < 1 << 62:
            raise ValueError(f"{(first, last, stride)} is not a range of steps")
    if _count(ranges) > rows:
        raise ValueError("it names more steps than it has rows")
    return ranges


@functools.lru_cache(maxsize=64)
def _order_of(said: bytes) -> tuple[int, ...]:
    """Parse a footer's order of places, mostly the same in all segments of a run; empty where it is none."""
    order = tuple(load_json(said))
    return order if sorted(order) == list(range(len(order))) else ()


def _order(said: bytes, places: int, rows: int, steps: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Return the order of places in each step, where the footer names one that fits its places, rows and steps."""
    order = _order_of(said)
    return order if len(order) == places and len(order) * _count(steps) == rows else ()


def _count(steps: Sequence[tuple[int, int, int]]) -> int:
    return sum((last - first) // stride + 1 for first, last, stride in steps)


def _has_every_step(places: list[tuple[str, str, str, str, int, int]], steps: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether each (site, port, slot) has as many rows as there are steps."""
    rows: Counter[tuple[str, str, str]] = Counter()
    for site, port, slot, _, _, count in places:
        rows[site, port, slot] += count
    return set(rows.values()) == {_count(steps)}


def _phases(file: Any) -> frozenset[str]:
    """Return the phases of a segment's rows, from the least and the greatest that its footer names."""
    metadata = file.metadata
    at = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}.get("phase")
    if at is None or not metadata.num_rows:
        return frozenset()
    said = [metadata.row_group(group).column(at).statistics for group in range(metadata.num_row_groups)]
    if not all(known is not None and known.has_min_max for known in said):
        return frozenset(pc.unique(file.read(["phase"])["phase"]).to_pylist())
    return frozenset(phase for known in said for phase in (known.min, known.max))


def expanded(ranges: Sequence[tuple[int, int, int]]) -> Steps:
    """Return the steps of ranges, in order.

    >>> expanded([(0, 4, 2), (5, 6, 1)])
    array([0, 2, 4, 5, 6])
    """
    spans = [np.arange(first, last + 1, stride, dtype=np.int64) for first, last, stride in ranges]
    return np.unique(np.concatenate(spans)) if spans else np.zeros(0, np.int64)


def steps_by_phase(rows: Any) -> dict[str, Steps]:
    """Return the steps of each phase, in order, from rows with the columns `step` and `phase`."""
    phase = rows["phase"].cast(pa.string()) if "phase" in rows.column_names else pa.nulls(len(rows), pa.string())
    named = pc.fill_null(phase, "")
    of = {phase: rows["step"].filter(pc.equal(named, phase)) for phase in pc.unique(named).to_pylist()}
    return {phase: np.unique(steps.to_numpy()) for phase, steps in of.items()}


@functools.lru_cache(maxsize=64)
def _places(said: bytes) -> list[tuple[str, str, str, str, int, int]]:
    """Parse a footer's places. The segments of one run mostly have the same, and parsing is most of opening a run."""
    places = [tuple(place) for place in load_json(said)]
    if not all([type(part) for part in place] == [str, str, str, str, int, int] for place in places):
        raise ValueError("its places must be four texts and two numbers each")
    return places


def dataset(files: Files, names: list[str], schema: Any) -> Any:
    """Return segments as one `pyarrow.dataset`, with the rank from their folders' names."""
    import pyarrow.dataset as ds  # it imports pandas, which a process that only writes should not have to

    return ds.dataset(
        [files.path(name) for name in names],
        schema=schema,
        filesystem=_file_system(files),
        format=ds.ParquetFileFormat(default_fragment_scan_options=_checked_pages()),
        partitioning=ds.partitioning(pa.schema([_RANK]), flavor="hive"),
    )


def _file_system(files: Files) -> Any:
    """Return Arrow's own file system for local runs: its threads read without calling Python."""
    from pyarrow.fs import LocalFileSystem

    return LocalFileSystem() if files.local is not None else files.fs


@functools.cache
def _checked_pages() -> Any:
    import pyarrow.dataset as ds

    return ds.ParquetFragmentScanOptions(page_checksum_verification=True)


def plain_rows(table: Any, rank: int, schema: Any) -> Any:
    """Return a tail's rows in the plain schema; columns that an older version did not write are null."""
    known = {
        field.name: table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    }
    ranks = pa.py_buffer(np.full(len(table), rank, np.int32))  # `pyarrow.scalar` would import pandas
    known["rank"] = pa.Array.from_buffers(pa.int32(), len(table), [None, ranks])
    return pa.table(known).cast(schema)


def derive_missing(table: Any, columns: Sequence[str]) -> Any:
    """Return the columns of a table that was read with `with_sources`, filled where an older version wrote none."""
    for name in columns:
        known = BY_NAME.get(name)
        if known is not None and known.derive is not None and table[name].null_count:
            given = {source: table[source].to_numpy(zero_copy_only=False) for source in known.sources}
            filled = pc.coalesce(table[name], pa.array(known.derive(given), from_pandas=True))
            table = table.set_column(table.column_names.index(name), table.schema.field(name), filled)
    return table.select(list(columns))


def tail_outline(table: Any) -> Outline:
    """Return the footer that a sealed segment of these rows would have."""
    if not table.num_rows or PLACE[0] not in table.column_names:
        return Outline([], [], table.num_rows, frozenset())
    said = outline(table)
    phases = frozenset(pc.unique(table["phase"]).to_pylist()) if "phase" in table.column_names else frozenset[str]()
    return Outline(_places(said[PLACES]), _steps(said[STEPS], table.num_rows), table.num_rows, frozenset(), phases)
