"""What a record looks like in Arrow, and how a step table becomes one batch of it without copying a column.

Arrays are made from buffers: `pyarrow.array` would import pandas into the user's process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.context.events import Event
from tensortap.record.step import Step
from tensortap.record.table import Names, StepTable
from tensortap.reduce.statistics import REGISTRY
from tensortap.store.messages import FixedMessage, RowWriter, record_writer, validity
from tensortap.store.tail import Tail
from tensortap.store.tensors import Stored
from tensortap.types import DTYPES

Array = npt.NDArray[Any]
_WORD = pa.dictionary(pa.int32(), pa.string())
_SMALL_WORD = pa.dictionary(pa.int8(), pa.string())
TIME: Final = pa.timestamp("us", "UTC")
NUMBERS: Final = pa.map_(pa.string(), pa.float64())
FILE_COUNTS: Final = pa.list_(pa.int64())
"""The counts of a histogram in Parquet: Spark's default reader has no unsigned integers in split byte planes."""
_PAIR: Final = pa.struct([NUMBERS.key_field, NUMBERS.item_field])

# The rank is in the folder's name (`rank=0/`), as every reader of partitioned Parquet expects.
RECORDS: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("phase", _SMALL_WORD),
        ("site", _WORD),
        ("port", _WORD),
        ("slot", _WORD),
        ("call", pa.int32()),
        ("seq", pa.int32()),
        ("op", _WORD),
        ("dtype", _SMALL_WORD),
        ("shape", pa.list_(pa.int64())),
        *((statistic.name, pa.int64() if statistic.dtype is np.int64 else pa.float64()) for statistic in REGISTRY),
        ("hist_offset", pa.int32()),
        ("hist_counts", pa.list_(pa.uint32())),
        ("reason", _WORD),
        ("recomputed", pa.bool_()),
        ("time", TIME),
        ("numbers", NUMBERS),
    ]
)
# A metric has a value, a label (`tap.span(request_id=…)`) a text.
METRICS: Final = pa.schema(
    [("step", pa.int64()), ("name", _WORD), ("value", pa.float64()), ("time", TIME), ("text", pa.string()),
     ("phase", pa.string()), ("owner", pa.string())]
)  # fmt: skip
# What happened in the training besides tensors: calls of losses, optimizers, loaders. `data` is a JSON object.
EVENTS: Final = pa.schema(
    [("step", pa.int64()), ("kind", pa.string()), ("name", pa.string()), ("code", pa.string()), ("data", pa.string()),
     ("time", TIME)]
)  # fmt: skip
TENSORS: Final = pa.schema(
    [("step", pa.int64()), ("name", pa.string()), ("entry", pa.string()), ("dtype", pa.string()),
     ("shape", pa.list_(pa.int64())), ("offset", pa.int64()), ("size", pa.int64()), ("crc32", pa.int64())]
)  # fmt: skip
# As older versions wrote them: the elements in the rows, to be written again when they were sealed.
TENSORS_WITH_DATA: Final = pa.schema([*list(TENSORS)[:5], ("data", pa.large_binary())])

WORDS: Final = ("phase", "site", "port", "slot", "op", "dtype", "reason")


class _BoundTable(NamedTuple):
    """What was made for a table, while its memory and the words are as they were: `generation` and `words` say so."""

    generation: int
    words: int
    batch: Any
    write: RowWriter | None


class Batches:
    """Make record batches of step tables. The arrays over a table's memory are made once and sliced every step."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._words: dict[str, Any] = {}
        self._message = bytearray()

    def of(self, step: Step) -> Any:
        """Return the rows of a step as one `pyarrow.RecordBatch`, valid until the table is used again."""
        table = step.table
        batch = self._bind(table).batch.slice(0, table.rows)
        return batch.set_column(len(RECORDS) - 1, "numbers", _numbers(table)) if table.values else batch

    def message(self, step: Step) -> bytearray | None:
        """Return the rows of a step as a message for a stream that has all words already, valid until the next one.

        None where Arrow has to make the batch.
        """
        write = None if step.table.values else self._bind(step.table).write
        if write is None:
            return None
        write(self._message, -1)
        return self._message

    def append(self, tail: Tail, step: Step, rows: int) -> None:
        """Append the rows of a step, so many, to a tail: as a message when the tail has all words already."""
        table, words = step.table, self._names.size
        known: _BoundTable | None = table.derived.get(self)
        if known is None or known.generation != table.generation or known.words != words:
            known = self._bind(table)
        if known.write is None or table.values or tail.vocabulary != words:
            tail.append(self.of(step), words)
        else:
            tail.append_rows(known.write, self._message, rows)

    def _bind(self, table: StepTable) -> _BoundTable:
        words, known = self._names.size, table.derived.get(self)
        if isinstance(known, _BoundTable) and (known.generation, known.words) == (table.generation, words):
            return known
        arrays = [self._array(table, field) for field in RECORDS]
        batch = pa.RecordBatch.from_arrays(arrays, schema=RECORDS)
        bound = table.derived[self] = _BoundTable(table.generation, words, batch, record_writer(table, batch))
        return bound

    def _array(self, table: StepTable, field: Any) -> Any:
        columns, capacity = table.columns, len(table.columns["key"])
        if field.name == "shape":
            return _list(field.type, columns["dims_ends"], columns["dims"], None)
        if field.name == "hist_counts":
            return _list(field.type, columns["hist_ends"], columns["hist_counts"], columns["hist_valid"])
        if field.name == "numbers":
            return pa.nulls(capacity, NUMBERS)
        if field.name in WORDS:
            codes = _flat(field.type.index_type, capacity, columns[field.name])
            return pa.DictionaryArray.from_arrays(codes, self._dictionary(field.name), safe=False)
        return _flat(field.type, capacity, columns[field.name], validity(columns, field.name))

    def _dictionary(self, field: str) -> Any:
        """Return the words of a column. The same object as long as there is no new word, so that it is written once."""
        if field == "dtype":
            return _DTYPES
        words = self._names.words[field]
        known = self._words.get(field)
        if known is None or len(known) != len(words):
            known = self._words[field] = _strings(list(words))
        return known


def _flat(kind: Any, length: int, data: npt.NDArray[Any], bitmap: npt.NDArray[Any] | None = None) -> Any:
    validity = None if bitmap is None else pa.py_buffer(bitmap)
    return pa.Array.from_buffers(kind, length, [validity, pa.py_buffer(data)], 0 if bitmap is None else -1)


def _list(kind: Any, ends: npt.NDArray[Any], data: npt.NDArray[Any], bitmap: npt.NDArray[Any] | None) -> Any:
    validity = None if bitmap is None else pa.py_buffer(bitmap)
    child = _flat(kind.value_type, len(data), data)
    nulls = 0 if bitmap is None else -1
    return pa.Array.from_buffers(kind, len(ends) - 1, [validity, pa.py_buffer(ends)], nulls, children=[child])


def _strings(words: Sequence[str]) -> Any:
    return _binary(pa.string(), [word.encode("utf-8", "backslashreplace") for word in words], np.int32)


def _binary(kind: Any, parts: Sequence[bytes], ends: type[np.integer[Any]]) -> Any:
    buffers = [None, pa.py_buffer(_ends(map(len, parts), ends)), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(kind, len(parts), buffers, 0)


def _ends(lengths: Iterable[int], kind: type[np.integer[Any]]) -> npt.NDArray[Any]:
    return np.array(list(accumulate(lengths, initial=0)), kind)  # for a few, faster than np.cumsum


def _numbers(table: StepTable) -> Any:
    """Return the named numbers of each row, as a map; null where there are none."""
    values = sorted(table.values, key=lambda value: value.row)
    count = np.bincount([value.row for value in values], minlength=table.rows)
    numbers = np.array([value.number for value in values], np.float64)
    pairs = [_strings([value.name for value in values]), _flat(pa.float64(), len(values), numbers)]
    inner = pa.Array.from_buffers(_PAIR, len(values), [None], 0, children=pairs)
    bitmap = np.packbits(count > 0, bitorder="little")
    buffers = [pa.py_buffer(bitmap), pa.py_buffer(_ends(count, np.int32))]
    return pa.Array.from_buffers(NUMBERS, table.rows, buffers, -1, children=[inner])


class MetricBatches:
    """Make batches of the user's metrics; the names are a dictionary that grows.

    As long as a step gives the same names as the one before, its numbers are written into the same message.
    """

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._dictionary = _strings([])
        self._names: tuple[str, ...] = ()
        self._about = ("", "")
        self._message: FixedMessage | None = None
        self._batch: Any = None
        self._bind((), self._about)

    def of(self, step: int, time: int, metrics: Mapping[str, float], phase: str = "", owner: str = "") -> Any:
        """Return a row for each metric, valid until the next call. `owner` is the model that the step's loss is of."""
        self._use(tuple(metrics), (phase, owner))
        self._step[:] = step
        self._value[:] = tuple(metrics.values())
        self._time[:] = time
        return self._batch

    def message(
        self, step: int, time: int, metrics: Mapping[str, float], phase: str = "", owner: str = ""
    ) -> bytearray:
        """Return the same as a message for a stream that has all names already, valid until the next one."""
        self._use(tuple(metrics), (phase, owner))
        count = len(metrics)
        if self._message is None:
            self._message = FixedMessage(self._batch, ((1, "q"), (5, "d"), (7, "q")))
        return self._message.of((step,) * count, tuple(metrics.values()), (time,) * count)

    def append(self, tail: Tail, step: Step) -> None:
        """Append the metrics of a step to a tail: as a message when the tail has all names already."""
        given = (step.number, step.time, step.metrics, step.phase, step.owner)
        if tail.vocabulary == len(self._codes) and all(name in self._codes for name in step.metrics):
            tail.append_message(self.message(*given), len(step.metrics))
        else:
            batch = self.of(*given)
            tail.append(batch, len(self._codes))

    def of_labels(self, step: int, time: int, labels: Mapping[str, str], phase: str = "") -> Any:
        """Return one row for each label."""
        count, names = len(labels), self._words(tuple(labels))
        columns = (pa.array([step] * count), names, pa.nulls(count, pa.float64()), pa.array([time] * count).view(TIME))
        texts = pa.array(list(labels.values()), pa.string())
        return pa.RecordBatch.from_arrays([*columns, texts, *_repeated((phase, ""), count)], schema=METRICS)

    def _words(self, names: tuple[str, ...]) -> Any:
        codes = np.array([self._codes.setdefault(name, len(self._codes)) for name in names], np.int32)
        if len(self._dictionary) != len(self._codes):
            self._dictionary = _strings(list(self._codes))
            self._names = ()  # its batch has the dictionary as it was
        return pa.DictionaryArray.from_arrays(_flat(pa.int32(), len(names), codes), self._dictionary, safe=False)

    def _use(self, names: tuple[str, ...], about: tuple[str, str]) -> None:
        if names != self._names or about != self._about:
            self._bind(names, about)

    def _bind(self, names: tuple[str, ...], about: tuple[str, str]) -> None:
        words = self._words(names)
        self._message = None
        self._names, self._about, count = names, about, len(names)
        self._step, self._value, self._time = np.zeros(count, np.int64), np.zeros(count), np.zeros(count, np.int64)
        self._batch = pa.RecordBatch.from_arrays(
            [
                _flat(pa.int64(), count, self._step),
                words,
                _flat(pa.float64(), count, self._value),
                _flat(TIME, count, self._time),
                pa.nulls(count, pa.string()),
                *_repeated(about, count),
            ],
            schema=METRICS,
        )


def _repeated(texts: tuple[str, ...], count: int) -> list[Any]:
    return [_strings([text] * count) if text else pa.nulls(count, pa.string()) for text in texts]


def tensor_message(kept: Sequence[Stored]) -> FixedMessage:
    """Return the message that tells where tensors lie; step, offset and checksum of each are filled in every time."""
    return FixedMessage(_tensor_batch(kept), ((1, "q"), (16, "q"), (20, "q")))


def batch_of_message(message: bytearray) -> Any:
    """Return the batch of such a message."""
    return pa.ipc.read_record_batch(pa.py_buffer(bytes(message)), TENSORS)


def _tensor_batch(kept: Sequence[Stored]) -> Any:
    """Return a batch of step 0 whose tensors lie nowhere."""
    arrays, count = [stored.array for stored in kept], len(kept)
    dims = np.array([dim for array in arrays for dim in array.shape], np.int64)
    shapes = _list(pa.list_(pa.int64()), _ends((array.ndim for array in arrays), np.int32), dims, None)
    names, entries, dtypes = [s.name for s in kept], [s.entry for s in kept], [array.dtype.name for array in arrays]
    zeros, sizes = np.zeros(count, np.int64), np.array([array.nbytes for array in arrays], np.int64)
    numbers = [_flat(pa.int64(), count, column) for column in (zeros, zeros, sizes, zeros)]
    columns = [numbers[0], _strings(names), _strings(entries), _strings(dtypes), shapes, *numbers[1:]]
    return pa.RecordBatch.from_arrays(columns, schema=TENSORS)


_DTYPES = _strings([d.name for d in DTYPES])


def event_batch(events: Sequence[Event]) -> Any:
    """Return events as one batch."""
    steps, times = (np.array([getattr(event, name) for event in events], np.int64) for name in ("step", "time"))
    words = [_strings([str(getattr(event, name)) for event in events]) for name in ("kind", "name", "code", "data")]
    columns = [_flat(pa.int64(), len(events), steps), *words, _flat(TIME, len(events), times)]
    return pa.RecordBatch.from_arrays(columns, schema=EVENTS)
