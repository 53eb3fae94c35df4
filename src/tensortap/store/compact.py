"""Folding a run's many small files into few, sorted by site, so that one site's history lies together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pyarrow.compute as pc

from tensortap.errors import RunError
from tensortap.store import layout, seal
from tensortap.store.claim import Lock, read_info
from tensortap.store.files import Files
from tensortap.store.sources import PLAIN_METRICS, PLAIN_RECORDS, Catalog, Sources, dataset
from tensortap.store.tensors import Stored, TensorReader, index_entry, write_tensors

Progress = Callable[[int, int], None]
_ROWS_AT_ONCE: Final = 1_000_000
_ROW_GROUP: Final = 64 * 1024
_SMALL_TENSORS: Final = 16 << 20
_TENSORS_AT_ONCE: Final = 256 << 20
_ORDER: Final = [(name, "ascending") for name in ("site", "port", "slot", "call", "step", "seq")]


class Compacted(NamedTuple):
    """What compaction did."""

    before_files: int
    after_files: int
    before_bytes: int
    after_bytes: int
    rows: int


def compact(path: str | os.PathLike[str], progress: Progress = lambda done, total: None) -> Compacted:
    """Fold each rank's segments into one and its small tensor files into few; seal what a crash left unsealed.

    Readers see either the old files or the new ones: a folded segment names what it replaces.
    """
    files = Files(path)
    read_info(files)
    catalog = Catalog(files)
    before = _sizes(files, catalog)
    files.make_folder(files.staging())
    lock = Lock(files.staging() / "_compact")
    try:
        for rank in catalog.ranks():
            _tidy(files, catalog, rank)
        total = sum(outline.rows for sources in catalog.records() for outline in sources.segments.values())
        done = 0
        for sources in catalog.records():
            done = _fold_records(files, sources, lambda n: progress(n, total), done)
            _fold_tensors(files, sources.rank)
        for sources in catalog.metrics():
            _fold_metrics(files, sources)
    finally:
        lock.close()
        (files.staging() / "_compact").unlink(missing_ok=True)
    after = _sizes(files, catalog)
    return Compacted(len(before), len(after), sum(before.values()), sum(after.values()), total)


def _sizes(files: Files, catalog: Catalog) -> dict[str, int]:
    folders = [
        folder
        for rank in catalog.ranks()
        for folder in (layout.rank_folder(rank), layout.metrics_folder(rank), layout.tensors_folder(rank))
    ]
    names = [f"{folder}/{name}" for folder in folders for name in files.list(folder) if "." in name[1:]]
    return {name: files.size(name) for name in names if not name.endswith(".json")}


def _tidy(files: Files, catalog: Catalog, rank: int) -> None:
    """Seal the tails that nobody writes to any more, and remove what a crash left behind that others hold already."""
    folders = (layout.rank_folder(rank), layout.metrics_folder(rank))
    for folder in folders:
        for name in catalog.sources(rank, folder).old_segments:
            files.remove(name)
    try:
        lock = Lock(files.staging() / layout.rank_folder(rank) / layout.LOCK)
    except RunError:  # it is being written: its tails are its own
        return
    try:
        for folder in folders:
            found = catalog.sources(rank, folder)
            for tail in found.old_tails:
                tail.unlink(missing_ok=True)
            for tail in found.tails:
                seal.seal_records(files, folder, tail)
        folder = layout.tensors_folder(rank)
        for tail in sorted((files.staging() / folder).glob("_tail-*.arrows")):
            seal.seal_tensors(files, folder, tail)
    finally:
        lock.close()


def _fold_records(files: Files, sources: Sources, progress: Callable[[int], None], done: int) -> int:
    rows = sum(outline.rows for outline in sources.segments.values())
    if len(sources.segments) < 2:
        return done + rows
    names = list(sources.segments)
    source = dataset(files, names, PLAIN_RECORDS)
    schema = PLAIN_RECORDS.remove(PLAIN_RECORDS.get_field_index("rank"))

    def parts() -> Iterator[Any]:
        ready = done
        for sites in _portions(sources.segments.values()):
            part = source.to_table(columns=schema.names, filter=pc.field("site").isin(sites)).sort_by(_ORDER)
            ready += part.num_rows
            yield part
            progress(ready)

    _replace(files, layout.rank_folder(sources.rank), sources, schema, parts(), _summed(sources.segments.values()))
    return done + rows


def _portions(outlines: Any) -> Iterator[list[str]]:
    """The sites in order, in portions whose rows fit into memory."""
    rows: dict[str, int] = {}
    for outline in outlines:
        for site, *_, count in outline.places:
            rows[site] = rows.get(site, 0) + count
    portion: list[str] = []
    size = 0
    for site in sorted(rows):
        if portion and size + rows[site] > _ROWS_AT_ONCE:
            yield portion
            portion, size = [], 0
        portion.append(site)
        size += rows[site]
    if portion:
        yield portion


def _summed(outlines: Any) -> dict[bytes, bytes]:
    """What the folded segment says of itself: the sum of what its parts said."""
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


def _fold_metrics(files: Files, sources: Sources) -> None:
    if len(sources.segments) < 2:
        return
    names = list(sources.segments)
    schema = PLAIN_METRICS.remove(PLAIN_METRICS.get_field_index("rank"))
    table = dataset(files, names, PLAIN_METRICS).to_table(columns=schema.names).sort_by("step")
    _replace(files, layout.metrics_folder(sources.rank), sources, schema, iter([table]), {})


def _replace(
    files: Files, folder: str, sources: Sources, schema: Any, parts: Iterator[Any], said: dict[bytes, bytes]
) -> None:
    """Write the parts as one segment that names what it replaces, then remove the old ones.

    What those had replaced is named too: a writer that was slow may still put one of them back.
    """
    names = list(sources.segments)
    idents = {str(layout.segment_id(name.rpartition("/")[2])) for name in names}
    idents = idents.union(*(outline.replaces for outline in sources.segments.values()))
    metadata = {**said, seal.REPLACES: json.dumps(sorted(idents)).encode()}
    name = f"{folder}/{layout.segment_name(layout.new_id())}"
    with files.replacing(name) as hidden, seal.segment_writer(hidden, schema) as writer:
        writer.add_key_value_metadata(metadata)
        for part in parts:
            writer.write_table(part, row_group_size=_ROW_GROUP)
    for name in names:
        files.remove(name)


def _fold_tensors(files: Files, rank: int) -> None:
    folder = layout.tensors_folder(rank)
    found = [layout.tensor_file(name) for name in files.list(folder)]
    small = [f for f in found if f and files.size(f"{folder}/{f.name}") < _SMALL_TENSORS]
    while len(small) > 1:
        batch: list[layout.TensorFile] = []
        size = 0
        while small and (not batch or size < _TENSORS_AT_ONCE):
            batch.append(small.pop(0))
            size += files.size(f"{folder}/{batch[-1].name}")
        if len(batch) > 1:
            _join_tensors(files, folder, batch)


def _join_tensors(files: Files, folder: str, batch: list[layout.TensorFile]) -> None:
    name = layout.tensors_name(min(f.first for f in batch), max(f.last for f in batch), layout.new_id())
    with files.replacing(f"{folder}/{name}") as hidden:
        write_tensors(hidden, (row for part in batch for row in _rows_of(files, f"{folder}/{part.name}")))
    for part in batch:
        files.remove(f"{folder}/{part.name}")


def _rows_of(files: Files, name: str) -> Iterator[Stored]:
    with files.open(name) as file:
        reader = TensorReader(file)
        for tensor, key in reader.keys().items():
            yield Stored(tensor, index_entry(key), reader.read(tensor))
