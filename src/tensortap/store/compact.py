"""Compact a run: merge its many small files into few, sorted by site, so that one site's history lies together."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tensortap.errors import RunError
from tensortap.store import names as layout
from tensortap.store import segments as seal
from tensortap.store.catalog import PLAIN_EVENTS, PLAIN_METRICS, PLAIN_RECORDS, Catalog, Outline, RankFiles, dataset
from tensortap.store.claim import Lock, compacting, read_info
from tensortap.store.files import Files, check_original
from tensortap.store.sealing import (
    remove_leftovers,
    remove_replaced,
    remove_sealed,
    remove_unfinished,
    remove_unfinished_run_json,
)
from tensortap.store.tensors import Stored, TensorReader, index_entry, misplaced, write_tensors

Progress = Callable[[int, int], None]
_ROWS_AT_ONCE: Final = 500_000
_ROW_GROUP: Final = 16 * 1024  # of few sites each: a reader of one site skips the others
_SMALL_TENSORS: Final = 16 << 20
_TENSORS_AT_ONCE: Final = 256 << 20
_ORDER: Final = [(name, "ascending") for name in ("site", "port", "slot", "call", "step", "seq")]


class Compacted(NamedTuple):
    """The result of a compaction."""

    before_files: int
    after_files: int
    before_bytes: int
    after_bytes: int
    rows: int
    damaged_files: int = 0  # left as they are, for they cannot be read to their end


def compact(path: str | os.PathLike[str], progress: Progress = lambda done, total: None) -> Compacted:
    """Fold each rank's small segments and tensor files into few; seal what a crash left unsealed.

    Readers see either the old files or the new ones: a folded segment names what it replaces.
    """
    files = Files(path)
    read_info(files)
    catalog = Catalog(files)
    before = _sizes(files, catalog)
    with compacting(files):
        for rank in catalog.ranks():
            _tidy(files, catalog, rank)
        remove_unfinished_run_json(files, catalog.ranks())
        records = [catalog.records(rank) for rank in catalog.ranks()]
        total = sum(outline.rows for found in records for outline in found.segments.values())
        done = 0
        for found in records:
            done = _fold_records(files, catalog, found, lambda n: progress(n, total), done)
            _fold_tensors(files, catalog, found.rank)
            _fold_metrics(files, catalog, found.rank)
    after = _sizes(files, catalog)
    return Compacted(len(before), len(after), sum(before.values()), sum(after.values()), total, len(catalog.damage))


def _sizes(files: Files, catalog: Catalog) -> dict[str, int]:
    folders = [folder for rank in catalog.ranks() for folder in layout.rank_folders(rank)]
    sizes: dict[str, int] = {}
    for folder in folders:
        for name in files.list(folder):
            if name.endswith((".parquet", ".arrows", ".safetensors")) and not name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # sealed meanwhile by the process that writes the run
                    sizes[f"{folder}/{name}"] = files.size(f"{folder}/{name}")
    return sizes


def _tidy(files: Files, catalog: Catalog, rank: int) -> None:
    """Seal the tails that no process writes to any more, and remove leftovers of a crash whose content other files
    hold.
    """
    listings = {
        layout.rank_folder(rank): catalog.records,
        layout.metrics_folder(rank): catalog.metrics,
        layout.events_folder(rank): catalog.events,
    }
    for list_files in listings.values():
        remove_replaced(files, list_files(rank))
    try:
        files.make_folder(files.staging() / layout.rank_folder(rank))
        lock = Lock(files.staging() / layout.rank_folder(rank) / layout.LOCK)
    except RunError:  # it is being written: its tails are its own
        return
    try:
        remove_leftovers(files, rank)
        remove_unfinished(files, rank)
        for folder, list_files in listings.items():
            found = list_files(rank)
            remove_sealed(files, found)
            for tail in found.tails:
                seal.seal_records(files, folder, tail)
        tensors = catalog.tensors(rank)
        for tail in (*tensors.tails, *tensors.old_tails):
            seal.seal_tensors(files, layout.tensors_folder(rank), tail)
    finally:
        lock.close()


def _readable(files: Files, catalog: Catalog, segments: Mapping[str, Outline], schema: Any) -> dict[str, Any]:
    """Return the rows of the segments that can be read to their end; the others stay as they are, and are counted."""
    found = {}
    for name in segments:
        try:
            seal.check_segment(files, name)
            found[name] = dataset(files, [name], schema).to_table(columns=_columns(schema))
        except FileNotFoundError:
            raise
        except seal.UNREADABLE as error:
            catalog.mark_damaged(name, error)
    return found


def _columns(schema: Any) -> list[str]:
    return [name for name in schema.names if name != "rank"]  # the folder's name tells it


def _fold_records(
    files: Files, catalog: Catalog, found: RankFiles, progress: Callable[[int], None], done: int
) -> int:  # fmt: skip
    rows = sum(outline.rows for outline in found.segments.values())
    ready = done
    for candidates in _groups(found.segments):
        tables = _readable(files, catalog, candidates, PLAIN_RECORDS)
        if len(tables) < 2:
            continue
        table = pa.concat_tables(tables.values()).sort_by(_ORDER)
        group = {name: candidates[name] for name in tables}
        said = _summed(group.values()) | seal.says_by_place(table)
        _replace(files, layout.rank_folder(found.rank), group, table, said)
        ready += table.num_rows
        progress(ready)
    progress(done + rows)
    return done + rows


def _groups(segments: Mapping[str, Outline]) -> Iterator[dict[str, Outline]]:
    """Yield groups of segments to fold: small ones, neighbours in time, as many rows as fit into memory.

    Large ones stay as they are, so folding a run that grows costs what was added to it.
    """
    small = [name for name in segments if segments[name].rows < _ROWS_AT_ONCE // 2]
    group: dict[str, Outline] = {}
    for name in sorted(small, key=lambda name: (segments[name].steps[:1], name)):
        if sum(outline.rows for outline in group.values()) + segments[name].rows > _ROWS_AT_ONCE:
            yield group
            group = {}
        group[name] = segments[name]
    if len(group) > 1:
        yield group


def _summed(outlines: Any) -> dict[bytes, bytes]:
    """Return the footer of the folded segment: the sum of the footers of its parts."""
    places: dict[tuple[str, ...], tuple[int, int]] = {}
    steps: set[int] = set()
    for outline in outlines:
        for *place, seq, count in outline.places:
            first, rows = places.get(tuple(place), (seq, 0))
            places[tuple(place)] = (min(first, seq), rows + count)
        for first, last, stride in outline.steps:
            steps.update(range(first, last + 1, stride))
    listed = [[*place, *known] for place, known in places.items()]
    return {
        seal.PLACES: json.dumps(listed).encode(),
        seal.STEPS: json.dumps(seal.ranges(sorted(steps))).encode(),
    }


def _fold_metrics(files: Files, catalog: Catalog, rank: int) -> None:
    """Fold the segments of metrics into one, and those of events."""
    _fold(files, catalog, catalog.metrics(rank), layout.metrics_folder(rank), PLAIN_METRICS)
    _fold(files, catalog, catalog.events(rank), layout.events_folder(rank), PLAIN_EVENTS)


def _fold(files: Files, catalog: Catalog, found: RankFiles, folder: str, schema: Any) -> None:
    tables = _readable(files, catalog, found.segments, schema) if len(found.segments) > 1 else {}
    if len(tables) > 1:
        group = {name: found.segments[name] for name in tables}
        _replace(files, folder, group, pa.concat_tables(tables.values()).sort_by("step"), {})


def _replace(files: Files, folder: str, segments: Mapping[str, Outline], table: Any, said: dict[bytes, bytes]) -> None:
    """Write a table as one segment that names what it replaces, then remove the old ones.

    What those had replaced is named too: a writer that was slow may still put one of them back.
    """
    idents = {outline.ident for outline in segments.values()}
    idents = idents.union(*(outline.replaces for outline in segments.values()))
    new = f"{folder}/{layout.segment_name(layout.new_id())}"
    with files.replacing(new) as hidden, seal.segment_writer(hidden, table.schema, new) as writer:
        writer.add_key_value_metadata({**said, seal.REPLACES: json.dumps(sorted(idents)).encode()})
        writer.write_table(table, row_group_size=_ROW_GROUP)
    for name in segments:
        files.remove(name)


def _fold_tensors(files: Files, catalog: Catalog, rank: int) -> None:
    small = [name for name in catalog.tensors(rank).names if files.size(name) < _SMALL_TENSORS]
    while len(small) > 1:
        batch: list[str] = []
        size = 0
        while small and (not batch or size < _TENSORS_AT_ONCE):
            batch.append(small.pop(0))
            size += files.size(batch[-1])
        if len(batch) > 1:
            _join_tensors(files, catalog, rank, batch)


def _join_tensors(files: Files, catalog: Catalog, rank: int, batch: list[str]) -> None:
    """Write the tensors of several files into one, and remove the files whose tensors could all be read."""
    rows: list[Stored] = []
    joined: list[layout.TensorFile] = []
    for name in batch:
        try:
            rows += list(_rows_of(files, name, rank))
            joined.append(layout.tensor_file(name.rpartition("/")[2]))  # type: ignore[arg-type]
        except FileNotFoundError:
            raise
        except seal.UNREADABLE as error:
            catalog.mark_damaged(name, error)
    if len(joined) > 1:
        folder = layout.tensors_folder(rank)
        ends = min(f.first for f in joined), max(f.last for f in joined)
        name = f"{folder}/{layout.tensors_name(*ends, layout.new_id())}"
        with files.replacing(name) as hidden:
            write_tensors(hidden, rows, name)
        for file in joined:
            files.remove(f"{folder}/{file.name}")


def _rows_of(files: Files, name: str, rank: int) -> Iterator[Stored]:
    """Yield the tensors of a file; one that holds those of another is left as it is: their names are taken."""
    with files.open(name) as file:
        reader = TensorReader(file)
        check_original(files, name, reader.written_as)
        keys = reader.keys()
        if why := misplaced(name, rank, keys.values()):
            raise ValueError(why)
        for tensor, key in keys.items():
            yield Stored(tensor, index_entry(key), reader.read(tensor))
