"""Seal tails: turn a tail into a Parquet segment, or into a file of tensors, and remove it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tensortap.reduce.statistics import COUNTS, STATISTICS
from tensortap.store.files import Files
from tensortap.store.footer import add_footer_checksum
from tensortap.store.names import segment_name, tail_id, tensors_id, tensors_name
from tensortap.store.schema import FILE_COUNTS, WORDS
from tensortap.store.tail import keep_aside, remove_tail
from tensortap.store.tail_reader import TENSOR_ROWS, TailContent, read_tail, row_kind
from tensortap.store.tensor_tail import TailTensor, seal_in_place, tail_tensors
from tensortap.store.tensors import Stored, TensorReader, write_tensors

REPLACES: Final = b"tensortap.replaces"
PLACES: Final = b"tensortap.places"
COLUMNS: Final = b"tensortap.columns"
STEPS: Final = b"tensortap.steps"
ORDER: Final = b"tensortap.order"
FILE: Final = b"tensortap.file"
BY_PLACE: Final = b"tensortap.by_place"
PLACE: Final = ("site", "port", "slot", "op")
_ROW_GROUP: Final = 1 << 20
# Splitting numbers into byte planes before zstd halves what histograms take (measured: 306 to 224 bytes a record).
_SPLIT: Final = (*STATISTICS, "value", "hist_offset", "hist_counts.list.element")
_DELTA: Final = ("step", "seq", "time")
_DICTIONARY: Final = (
    *WORDS,
    "name",
    "kind",
    "code",
    "numel",
    "call",
    *COUNTS,
    "shape.list.element",
    "numbers.key_value.key",
)


def write_segment(path: Path, table: Any, name: str = "") -> None:
    """Write a table of records, metrics or events as one Parquet file, which will be called `name` in its run."""
    if "hist_counts" in table.column_names:
        counts = table["hist_counts"].cast(FILE_COUNTS)
        table = table.set_column(table.column_names.index("hist_counts"), "hist_counts", counts)
    with segment_writer(path, table.schema, name) as writer:
        writer.add_key_value_metadata(outline(table))
        writer.write_table(table, row_group_size=_ROW_GROUP)


@contextlib.contextmanager
def segment_writer(path: Path, schema: Any, name: str = "") -> Iterator[Any]:
    """Yield a Parquet writer with the encodings that suit records; at the end the footer gets its checksum.

    The footer tells the name that the file will have in its run: a copy under another name would double its rows.
    """
    with _parquet_writer(path, schema.remove_metadata()) as writer:
        writer.add_key_value_metadata({COLUMNS: json.dumps(schema.names).encode(), FILE: name.encode()})
        yield writer
    add_footer_checksum(path)


def _parquet_writer(path: Path, schema: Any) -> Any:
    names = _leaves(schema)
    split: dict[str, str] = {name: "BYTE_STREAM_SPLIT" for name in _SPLIT if name in names}
    delta = {name: "DELTA_BINARY_PACKED" for name in _DELTA if name in names}
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in _DICTIONARY if name in names],
        column_encoding=split | delta,
        store_schema=False,
        write_statistics=[name for name in schema.names if name in names],  # of lists they would say nothing
        write_page_index=True,
        write_page_checksum=True,
    )


UNREADABLE: Final = (
    OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, MemoryError, pa.ArrowException
)  # fmt: skip


def check_segment(files: Files, name: str) -> int:
    """Read a segment to its end, checksums included, and return how many rows it has; raise what is wrong with it."""
    with files.open(name) as source, pq.ParquetFile(source, page_checksum_verification=True) as file:
        rows = 0
        for batch in file.iter_batches():
            batch.validate(full=True)
            rows += len(batch)
        if rows != file.metadata.num_rows:
            raise ValueError(f"it says that it has {file.metadata.num_rows} rows, and {rows} can be read")
    return rows


def outline(table: Any) -> dict[bytes, bytes]:
    """Return what a segment's footer says of it, so that a run's sites and steps are known without reading rows."""
    if "site" not in table.column_names:
        return {}
    column = _plain(table["step"], np.int64)
    steps = np.unique(column)
    places, place = _places(table)
    said = {PLACES: json.dumps(places).encode(), STEPS: json.dumps(ranges(steps.tolist())).encode()}
    order = same_order(column, place, steps)
    return said if order is None else {**said, ORDER: json.dumps(order.tolist()).encode()}


def same_order(step: npt.NDArray[Any], place: npt.NDArray[Any], steps: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return the places of one step's rows in order, where every step has the same and no place comes twice.

    >>> same_order(np.array([4, 4, 5, 5]), np.array([1, 0, 1, 0]), np.array([4, 5]))
    array([1, 0])
    """
    if not len(steps) or len(step) % len(steps):
        return None
    order = place[: len(step) // len(steps)]
    by_step = (step.reshape(len(steps), -1) == steps[:, None]).all()
    same = by_step and (place.reshape(len(steps), -1) == order).all() and len(np.unique(order)) == len(order)
    return order if same else None


def says_by_place(table: Any) -> dict[bytes, bytes]:
    """Return what the footer of rows that are sorted by place says where every place has every step once.

    Those of a place with two calls in some steps do not follow each other in this way.
    """
    column = _plain(table["step"], np.int64)
    steps = np.unique(column)
    whole = bool(len(steps)) and not len(column) % len(steps) and (column.reshape(-1, len(steps)) == steps).all()
    return {BY_PLACE: b"true"} if whole else {}


def _places(table: Any) -> tuple[list[tuple[Any, ...]], npt.NDArray[Any]]:
    """Return each place with its first sequence number and how many rows it has, and the place of each row."""
    words, code = [], np.zeros(table.num_rows, np.int64)
    for name in PLACE:
        column = table[name].combine_chunks()
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        words.append(encoded.dictionary.to_pylist())
        code = code * len(words[-1]) + _plain(encoded.indices, np.int32)
    keyed = np.sort(code << 32 | _plain(table["seq"], np.int32))  # each place's smallest sequence number comes first
    starts = np.flatnonzero(np.diff(keyed >> 32, prepend=-1))
    present = keyed[starts] >> 32
    numbers = np.unravel_index(present, [len(known) for known in words])
    names = [[known[i] for i in column] for known, column in zip(words, numbers, strict=True)]
    first, count = keyed[starts] & 0xFFFFFFFF, np.diff(np.append(starts, len(keyed)))
    return list(zip(*names, first.tolist(), count.tolist(), strict=True)), np.searchsorted(present, code)


def _plain(column: Any, dtype: Any) -> npt.NDArray[Any]:
    """Return a column without nulls as an array; `to_numpy` would import pandas into the user's process."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.frombuffer(c.buffers()[1], dtype)[c.offset : c.offset + len(c)] for c in chunks if len(c)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def ranges(steps: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return sorted numbers as (first, last, stride) runs.

    >>> ranges([0, 100, 200, 201, 202])
    [(0, 200, 100), (201, 202, 1)]
    """
    runs: list[tuple[int, int, int]] = []
    for step in steps:
        if runs and (runs[-1][0] == runs[-1][1] or step - runs[-1][1] == runs[-1][2]):
            runs[-1] = (runs[-1][0], step, step - runs[-1][1])
        else:
            runs.append((step, step, 1))
    return runs


def _leaves(schema: Any) -> set[str]:
    leaves: set[str] = set()
    for field in schema:
        if pa.types.is_list(field.type):
            leaves.add(f"{field.name}.list.element")
        elif pa.types.is_map(field.type):
            leaves.add(f"{field.name}.key_value.key")
        else:
            leaves.add(field.name)
    return leaves


def seal_records(files: Files, folder: str, tail: Path) -> int:
    """Turn a tail of records or metrics into a segment with the same id; return how many rows it has."""
    content = read_tail(tail, row_kind(folder))
    ident = tail_id(tail.name)
    if content.table is not None and ident is not None:
        name = f"{folder}/{segment_name(ident)}"
        with files.replacing(name) as hidden:
            write_segment(hidden, content.table.combine_chunks(), name)  # column by column, twice as fast as by batch
    retire(tail, content)
    return 0 if content.table is None else len(content.table)


def seal_tensors(files: Files, folder: str, tail: Path) -> int:
    """Turn a tail of small tensors into one safetensors file; return how many it has."""
    content = read_tail(tail, TENSOR_ROWS)
    ident, sealed = tail_id(tail.name), 0
    if content.table is not None and ident is not None and not _is_sealed(files, folder, ident, len(content.table)):
        found, whole = tail_tensors(content.table, tail)
        steps = content.table["step"].to_pylist()
        name = f"{folder}/{tensors_name(min(steps), max(steps), ident)}"
        sealed = len(found)
        plain = whole and not content.damaged and len(found) == len(steps)
        if not (plain and seal_in_place(files, name, tail, found)):
            rows, readable = _readable(found)
            content = content._replace(damaged=content.damaged or not (whole and readable))
            sealed = len(rows)
            if rows:
                with files.replacing(name) as hidden:
                    write_tensors(hidden, rows, name)
    retire(tail, content)
    return sealed


def _is_sealed(files: Files, folder: str, ident: str, tensors: int) -> bool:
    """Return whether a process was killed after it had sealed a tail, before it removed it."""
    names = [name for name in files.list(folder) if tensors_id(name) == ident]
    with contextlib.suppress(*UNREADABLE), files.open(f"{folder}/{names[0]}") as file:
        return len(TensorReader(file).entries) >= tensors
    return False


def _readable(tensors: Sequence[TailTensor]) -> tuple[list[Stored], bool]:
    """Return the tensors whose elements can be read, and whether these are all."""
    rows = []
    for tensor in tensors:
        with contextlib.suppress(OSError, ValueError, MemoryError):
            rows.append(tensor.stored)
    return rows, len(rows) == len(tensors)


def retire(tail: Path, content: TailContent) -> None:
    """Remove a tail that was read to its end. One that was not is kept aside, so that more of it may be read later."""
    if content.damaged:
        keep_aside(tail)
    else:
        remove_tail(tail)
