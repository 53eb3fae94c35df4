"""Read a tail, whatever has happened to it: whole batches, salvaged ones, and whether anything is lost.

Bytes that their checksums confirm are given to Arrow as they are. All others (tails of version 1, the last append of a
killed process, damaged files) are first taken apart into messages, each of which is checked: Arrow itself may crash on
a dictionary with wild offsets. Behind a message that cannot be read the next one is looked for.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.reduce.histogram import BUCKETS
from tensortap.store import names as layout
from tensortap.store.messages import root, scalar, table_in
from tensortap.store.schema import EVENTS, METRICS, RECORDS, TENSORS, TENSORS_WITH_DATA
from tensortap.store.tail import MessageChecksum, read_checks
from tensortap.store.tensors import of_step

_MARKER: Final = b"\xff\xff\xff\xff"
_END: Final = _MARKER + bytes(4)
_ERRORS: Final = (pa.ArrowException, OSError, EOFError, ValueError, KeyError, IndexError, struct.error)
_ATTEMPTS: Final = 64
_DICTIONARY: Final = 2  # the kind of a message, as its metadata tells it
_RANGES: Final = {"step": 1 << 62, "time": 253_402_300_799_000_000, "seq": 1 << 31, "call": 1 << 31, "numel": 1 << 62}
_LONGEST_SEARCH: Final = 100_000  # places at which a message is looked for


_VERSION_1: Final = (
    "step", "phase", "site", "port", "slot", "call", "seq", "op", "dtype", "shape", "numel", "nan", "posinf", "neginf",
    "zeros", "min", "max", "mean", "std", "l1", "l2", "hist_offset", "hist_counts", "reason", "recomputed", "time",
    "numbers",
)  # fmt: skip


class RowKind(NamedTuple):
    """The form of rows of one kind: all schemas they were ever written with, and the columns without nulls."""

    schemas: tuple[Any, ...]
    required: tuple[str, ...]


RECORD_ROWS: Final = RowKind(
    (RECORDS, pa.schema([field for field in RECORDS if field.name in _VERSION_1])),
    ("step", "phase", "site", "port", "slot", "call", "seq", "op", "dtype", "numel", "reason", "recomputed", "time"),
)
METRIC_ROWS: Final = RowKind((METRICS,), ("step", "name", "time"))
EVENT_ROWS: Final = RowKind((EVENTS,), tuple(EVENTS.names))
TENSOR_ROWS: Final = RowKind((TENSORS, TENSORS_WITH_DATA), ("step", "name", "entry", "dtype", "shape"))


def row_kind(folder: str) -> RowKind:
    """Return the form of the rows in a folder of records, metrics or events."""
    if folder.startswith(layout.METRICS):
        return METRIC_ROWS
    return EVENT_ROWS if folder.startswith(layout.EVENTS) else RECORD_ROWS


class TailContent(NamedTuple):
    """The rows of a tail, None when there are none; `damaged` when more was written than can be read.

    A last batch that a killed process left half written is not damage.
    """

    table: Any
    damaged: bool


class _Message(NamedTuple):
    start: int
    end: int
    kind: str


def read_tail(path: Path, kind: RowKind, length: int = -1) -> TailContent:
    """Read a tail, or its first `length` bytes."""
    with path.open("rb") as file:
        data = file.read(length)
        checks = read_checks(path)
        size = file.seek(0, 2)
    truncated = any(check.end > size for check in checks)
    content = decode(data, [check for check in checks if check.end <= len(data)], kind.schemas, truncated)
    return _with_step_numbers(usable(content, kind)) if kind is TENSOR_ROWS else usable(content, kind)


def _with_step_numbers(content: TailContent) -> TailContent:
    """Return the rows of tensors with their steps in names and entries, where the tail leaves them out."""
    rows = content.table
    if rows is None:
        return content
    named = zip(*(rows[name].to_pylist() for name in ("step", "name", "entry")), strict=True)
    names, entries = zip(*(of_step(*row) for row in named), strict=True)
    for column, texts in (("name", names), ("entry", entries)):
        rows = rows.set_column(rows.column_names.index(column), column, pa.array(texts, pa.string()))
    return content._replace(table=rows)


def usable(content: TailContent, kind: RowKind) -> TailContent:
    """Return rows without those that no reader can use: of other columns or types, or without a place or a step."""
    rows, damaged = content
    if rows is None:
        return content
    known = kind.schemas[0]
    wrong = [f.name for f in rows.schema if f.name in known.names and f.type != known.field(f.name).type]
    if wrong or any(name not in rows.column_names for name in kind.required):
        return TailContent(None, True)
    possible = possible_rows(rows, kind.required)
    return TailContent(possible if len(possible) else None, damaged or len(possible) < len(rows))


def possible_rows(rows: Any, required: Sequence[str]) -> Any:
    """Return the rows that have a place, a step and a time: only a damaged file has others."""
    for name in required:
        if name in rows.column_names and rows[name].null_count:
            rows = rows.filter(rows[name].is_valid())
    for name, most in _RANGES.items():
        if name in rows.column_names and len(rows):
            values = rows[name].cast(pa.int64())
            ends = pc.min_max(values).as_py()
            if ends["min"] is not None and (ends["min"] < 0 or ends["max"] > most):
                rows = rows.filter(pc.and_(pc.greater_equal(values, 0), pc.less_equal(values, most)))
    return _with_possible_histograms(rows)


def _with_possible_histograms(rows: Any) -> Any:
    """Return the rows whose histograms lie within the buckets there are: others would be given memory for nothing."""
    if not {"hist_offset", "hist_counts"} <= set(rows.column_names) or not len(rows):
        return rows
    first = rows["hist_offset"].cast(pa.int64())
    last = pc.add(first, pc.list_value_length(rows["hist_counts"]).cast(pa.int64()))
    least, most = pc.min(first).as_py(), pc.max(last).as_py()
    if least is None or (least >= 0 and (most is None or most <= BUCKETS)):
        return rows
    possible = pc.and_(pc.greater_equal(first, 0), pc.less_equal(last, BUCKETS))
    return rows.filter(pc.fill_null(possible, True))


def decode(
    data: bytes, checks: Sequence[MessageChecksum] = (), schemas: Sequence[Any] = (), truncated: bool = False
) -> TailContent:  # fmt: skip
    """Return the rows in the bytes of a tail."""
    bad = [check for check in checks if not check.holds(data)]
    confirmed = -1 if bad else _covered(checks)
    batches = _confirmed_batches(data, confirmed) if confirmed > 0 else None
    if batches is not None:
        return TailContent(_table(batches), truncated)
    found, gaps = _scan(data)
    whole = [message for message in found if not any(message.start < c.end and message.end > c.start for c in bad)]
    batches, lost = _assemble(data, whole, schemas)
    return TailContent(_table(batches), truncated or gaps or lost or bool(bad))


def _covered(checks: Sequence[MessageChecksum]) -> int:
    """Return how far the checksums reach without a gap."""
    end = 0
    for check in checks:
        if check.start != end:
            return -1
        end = check.end
    return end


def _confirmed_batches(data: bytes, confirmed: int) -> list[Any] | None:
    """Return all batches when checksums confirm the first ones and the others are sound; else None."""
    found, gaps = _scan(data, confirmed)
    if gaps:
        return None
    try:
        batches = list(pa.ipc.open_stream(data[: found[-1].end if found else confirmed]))
        for batch in batches[len(batches) - sum(message.kind == "record batch" for message in found) :]:
            batch.validate(full=True)
    except _ERRORS:
        return None
    return batches


def _table(batches: list[Any]) -> Any:
    return pa.Table.from_batches(batches).unify_dictionaries() if batches else None


def _scan(data: bytes, at: int = 0) -> tuple[list[_Message], bool]:
    """Return the messages that can be read, and whether something lies between or behind them that cannot."""
    found: list[_Message] = []
    buffer, gaps, ended = pa.py_buffer(data), False, False
    for _ in range(_LONGEST_SEARCH):
        if at >= len(data):
            break
        if data[at : at + 8] == _END:
            ended, at = True, at + 8
            continue
        message = _message(buffer, at)
        if message is not None:
            gaps = gaps or ended  # an end in the middle was none
            found.append(message)
            at = message.end
            continue
        following = _next_message(data, buffer, at)
        gaps = gaps or following is not None or ended or not _may_be_torn(data, at)
        if following is None:
            break
        at = following
    return found, gaps


def _message(buffer: Any, at: int) -> _Message | None:
    """Return the message at a position, if there is one that can be read safely."""
    if buffer[at : at + 4].to_pybytes() != _MARKER:
        return None
    source = pa.BufferReader(buffer.slice(at))
    try:
        message = pa.ipc.read_message(source)
        if message.type == "dictionary" and not _sound_dictionary(message):
            return None
        if message.type == "schema":
            _ = pa.ipc.read_schema(message).names  # a column's name may be no text
    except _ERRORS:
        return None
    return _Message(at, at + source.tell(), message.type)


def _next_message(data: bytes, buffer: Any, at: int) -> int | None:
    """Return where the next message begins; messages lie at multiples of eight bytes."""
    for _ in range(_LONGEST_SEARCH):
        at = data.find(_MARKER, at + 1)
        if at < 0:
            return None
        if at % 8 == 0 and data[at : at + 8] != _END and _message(buffer, at) is not None:
            return at
    return None


def _may_be_torn(data: bytes, at: int) -> bool:
    """Return whether the rest looks like a message that a killed process began to write."""
    if len(data) - at < 8:
        return data[at:] in (_MARKER[: len(data) - at], _END[: len(data) - at]) or data[at : at + 4] == _MARKER
    length = int.from_bytes(data[at + 4 : at + 8], "little", signed=True)
    if data[at : at + 4] != _MARKER or not 0 < length < 1 << 28:
        return False
    try:
        pa.ipc.read_message(data[at:])
    except _ERRORS as error:
        announces_more = len(data) - at - 8 < length or "message body" in str(error)
        return announces_more and not _is_whole(data[at + 8 :], length)  # else it is damaged
    return False


def _is_whole(rest: bytes, length: int) -> bool:
    """Return whether all of a message is there, so that a damaged length only makes it look torn.

    `rest` are its bytes behind the prefix, and `length` is what that says of the metadata.
    """
    with contextlib.suppress(*_ERRORS, MemoryError):
        body, needed = _body_lengths(rest)
        if needed <= len(rest) - length:
            return True
        pa.ipc.read_message(_MARKER + struct.pack("<i", len(rest) - body) + rest)
        return True
    return False


def _body_lengths(metadata: bytes) -> tuple[int, int]:
    """Return how long the body of a batch is said to be, and how long it is by the places of its buffers."""
    message = root(metadata)
    batch = table_in(metadata, message, 2)
    if metadata[scalar(metadata, message, 1)] == _DICTIONARY:
        batch = table_in(metadata, batch, 1)
    at = table_in(metadata, batch, 2)
    size = 16 * int(struct.unpack_from("<I", metadata, at)[0])
    if at + 4 + size > len(metadata):
        raise ValueError("the metadata ends before its list of buffers")
    ends = [begin + length for begin, length in struct.iter_unpack("<qq", metadata[at + 4 : at + 4 + size])]
    needed = -(-max(ends, default=0) // 8) * 8  # the last one is padded too
    return int(struct.unpack_from("<q", metadata, scalar(metadata, message, 3))[0]), needed


def _assemble(data: bytes, messages: list[_Message], schemas: Sequence[Any]) -> tuple[list[Any], bool]:
    """Return the batches of messages, and whether some had to be left out."""
    own = [message for message in messages if message.kind == "schema"]
    rest = [message for message in messages if message.kind != "schema"]
    if own:
        return _batches(data[own[0].start : own[0].end], data, rest)
    found = [_batches(schema.serialize().to_pybytes(), data, rest) for schema in schemas] if rest else []
    best = max((batches for batches, _ in found), key=lambda batches: sum(map(len, batches)), default=[])
    return best, bool(rest)


def _batches(schema: bytes, data: bytes, messages: list[_Message]) -> tuple[list[Any], bool]:
    """Decode messages behind a schema. One that cannot be decoded is left out, and the others tried again."""
    lost, failed_at, batches = False, -1, list[Any]()
    if not any(message.kind == "record batch" for message in messages):
        return [], False
    for _ in range(_ATTEMPTS):
        stream = b"".join([schema, *(data[m.start : m.end] for m in messages), _END])
        batches, complete = _checked_batches(stream)
        if complete:
            return batches, lost
        lost = True
        record_batches = [i for i, message in enumerate(messages) if message.kind == "record batch"]
        if len(batches) >= len(record_batches):
            return batches, True
        at, before = record_batches[len(batches)], record_batches[len(batches) - 1] if batches else -1
        if failed_at == len(batches) and at - before > 1:  # not the batch: the dictionaries before it
            messages = messages[: before + 1] + messages[at:]
            failed_at = -1
        else:
            messages = messages[:at] + messages[at + 1 :]
            failed_at = len(batches)
    return batches, True


def _checked_batches(stream: bytes) -> tuple[list[Any], bool]:
    """Return the batches up to the first that cannot be decoded, and whether that is all of them."""
    batches: list[Any] = []
    try:
        for batch in pa.ipc.open_stream(stream):
            batch.validate(full=True)
            batches.append(batch)
    except _ERRORS:
        return batches, False
    return batches, True


def _sound_dictionary(message: Any) -> bool:
    """Return whether a dictionary of strings has offsets that stay inside its text."""
    metadata, body = message.metadata.to_pybytes(), message.body  # Arrow has verified it
    batch = table_in(metadata, table_in(metadata, root(metadata), 2), 1)
    rows = struct.unpack_from("<q", metadata, table_in(metadata, batch, 1) + 4)[0]
    at = table_in(metadata, batch, 2) + 4
    (_, _), (start, size), (text, text_size) = struct.iter_unpack("<qq", metadata[at : at + 48])
    if rows < 0 or size < 4 * (rows + 1) or start < 0 or text < 0 or start + size > len(body):
        return bool(rows == 0)
    ends = np.frombuffer(body.slice(start, 4 * (rows + 1)), np.int32)
    if ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > text_size or text + text_size > len(body):
        return False
    body.slice(text, int(ends[-1])).to_pybytes().decode()
    return True
