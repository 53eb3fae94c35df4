"""What a record looks like in Arrow, and how a step table becomes one batch of it without copying a column."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.step import Step
from tensortap.table import Names, StepTable
from tensortap.types import COUNTS, DTYPES, PHASES, STATISTICS

_WORD = pa.dictionary(pa.int32(), pa.string())
_SMALL_WORD = pa.dictionary(pa.int8(), pa.string())
TIME: Final = pa.timestamp("us", "UTC")
NUMBERS: Final = pa.map_(pa.string(), pa.float64())

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
        ("numel", pa.int64()),
        *((name, pa.int64()) for name in COUNTS),
        *((name, pa.float64()) for name in STATISTICS),
        ("hist_offset", pa.int32()),
        ("hist_counts", pa.list_(pa.uint32())),
        ("reason", _WORD),
        ("recomputed", pa.bool_()),
        ("time", TIME),
        ("numbers", NUMBERS),
    ]
)
METRICS: Final = pa.schema([("step", pa.int64()), ("name", _WORD), ("value", pa.float64()), ("time", TIME)])
TENSORS: Final = pa.schema(
    [("step", pa.int64()), ("name", pa.string()), ("entry", pa.string()), ("dtype", pa.string()),
     ("shape", pa.list_(pa.int64())), ("data", pa.large_binary())]
)  # fmt: skip

WORDS: Final = ("phase", "site", "port", "slot", "op", "dtype", "reason")
_DEFINED: Final = frozenset(("min", "max", "mean", "std"))
_PHASES = pa.array(PHASES, pa.string())
_DTYPES = pa.array([d.name for d in DTYPES], pa.string())


class Batches:
    """Makes record batches of step tables. The arrays over a table's memory are made once and sliced every step."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._words: dict[str, Any] = {}
        self._bound: weakref.WeakKeyDictionary[StepTable, tuple[Any, Any]] = weakref.WeakKeyDictionary()

    def of(self, step: Step) -> Any:
        """The rows of a step as one `pyarrow.RecordBatch`, valid until the table is used again."""
        table = step.table
        version = (table.generation, *(len(words) for words in self._names.words.values()))
        known = self._bound.get(table)
        if known is None or known[0] != version:
            known = (version, self._bind(table))
            self._bound[table] = known
        batch = known[1].slice(0, table.rows)
        return batch.set_column(len(RECORDS) - 1, "numbers", _numbers(table)) if table.values else batch

    def _bind(self, table: StepTable) -> Any:
        return pa.RecordBatch.from_arrays([self._array(table, field) for field in RECORDS], schema=RECORDS)

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
        bitmap = columns["defined"] if field.name in _DEFINED else None
        bitmap = columns["hist_valid"] if field.name == "hist_offset" else bitmap
        return _flat(field.type, capacity, columns[field.name], bitmap)

    def _dictionary(self, field: str) -> Any:
        """The words of a column. The same object as long as there is no new word, so that it is written once."""
        if field == "phase":
            return _PHASES
        if field == "dtype":
            return _DTYPES
        words = self._names.words[field]
        known = self._words.get(field)
        if known is None or len(known) != len(words):
            known = self._words[field] = pa.array(list(words), pa.string())
        return known


def _flat(kind: Any, length: int, data: npt.NDArray[Any], bitmap: npt.NDArray[Any] | None = None) -> Any:
    validity = None if bitmap is None else pa.py_buffer(bitmap)
    return pa.Array.from_buffers(kind, length, [validity, pa.py_buffer(data)], 0 if bitmap is None else -1)


def _list(kind: Any, ends: npt.NDArray[Any], data: npt.NDArray[Any], bitmap: npt.NDArray[Any] | None) -> Any:
    validity = None if bitmap is None else pa.py_buffer(bitmap)
    child = _flat(kind.value_type, len(data), data)
    nulls = 0 if bitmap is None else -1
    return pa.Array.from_buffers(kind, len(ends) - 1, [validity, pa.py_buffer(ends)], nulls, children=[child])


def _numbers(table: StepTable) -> Any:
    by_row: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for value in table.values:
        by_row[value.row].append((value.name, value.number))
    return pa.array([by_row.get(row) for row in range(table.rows)], NUMBERS)


class MetricBatches:
    """Makes batches of the user's metrics; the names are a dictionary that grows."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._dictionary = pa.array([], pa.string())

    def of(self, step: int, time: int, metrics: Mapping[str, float]) -> Any:
        """One row a metric."""
        codes = [self._codes.setdefault(name, len(self._codes)) for name in metrics]
        if len(self._dictionary) != len(self._codes):
            self._dictionary = pa.array(list(self._codes), pa.string())
        count = len(codes)
        names = pa.DictionaryArray.from_arrays(pa.array(np.array(codes, np.int32)), self._dictionary, safe=False)
        return pa.RecordBatch.from_arrays(
            [
                pa.array(np.full(count, step)),
                names,
                pa.array(np.fromiter(metrics.values(), np.float64, count)),
                pa.array(np.full(count, time)).view(TIME),
            ],
            schema=METRICS,
        )
