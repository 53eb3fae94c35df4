"""Merge records over ranks, steps or calls when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.distributed.replicas import ReplicaGroups
from tensortap.errors import RunError, suggest
from tensortap.reduce.merge import merge_groups, merge_histograms
from tensortap.reduce.statistics import NUMBERS
from tensortap.store.arrays import array_of, arrow_of, encoded, numbered

Ints = npt.NDArray[np.int64]
Over = Literal["ranks", "steps", "calls"]
_FOLDED: Final = {"ranks": "rank", "steps": "step", "calls": "call"}
_KEYS: Final = ("step", "phase", "rank", "site", "port", "slot", "call", "op", "recomputed")


Histograms = Callable[[Any, Ints], dict[str, Any]]  # rows in the order of their groups, and where each group begins


def fold(
    rows: Any, over: Over | Sequence[Over], parts: ReplicaGroups | None = None, *, by_phase: bool = False,
    histograms: Histograms | None = None, order_by: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Return one row for each place, and for each of step, rank and call that is not folded over.

    `records` is how many were folded into it, `first_step` and `last_step` what they spanned. Over ranks, copies of
    one tensor (`parts` tells) count once, and `summands` says where ranks hold partial sums instead of pieces.
    `by_phase` keeps training and evaluation apart. `histograms` merges those that are not among the columns. Rows
    come in order of execution, or in the order of the columns `order_by`.
    """
    names = [over] if isinstance(over, str) else list(over)
    if "ranks" in names and parts:
        rows = parts.without_replicas(rows)
    for name in names:
        if name not in _FOLDED:
            raise RunError(f"over= must be ranks, steps or calls, got {name!r}.{suggest(name, _FOLDED)}")
    gone = {_FOLDED[name] for name in names} | (set() if by_phase else {"phase"})
    keys = [key for key in _KEYS if key in rows.column_names and key not in gone]
    order, starts = _group(rows, keys, order_by)
    rows = rows.take(arrow_of(order))
    columns = {name: array_of(rows[name]) for name in NUMBERS}
    names_kept = [*keys, *(name for name in ("dtype", "shape") if name in rows.column_names)]
    folded: dict[str, Any] = {name: _text(rows[name].take(arrow_of(starts))) for name in names_kept}
    folded["records"] = arrow_of(np.diff(np.append(starts, len(rows))))
    if "steps" in names and len(rows):
        steps = array_of(rows["step"])
        folded["first_step"] = arrow_of(np.minimum.reduceat(steps, starts))
        folded["last_step"] = arrow_of(np.maximum.reduceat(steps, starts))
    merged = merge_groups(columns, starts) if len(rows) else columns
    folded |= {name: arrow_of(merged[name], np.isnan(merged[name])) for name in NUMBERS}
    if histograms is not None or "hist_counts" in rows.column_names:
        folded |= (histograms or _histograms)(rows, starts)
    if "ranks" in names and parts and parts.partial_sums:
        folded["summands"] = parts.are_partial_sums(folded)
    return pa.table(folded)


def _group(rows: Any, keys: list[str], order_by: Sequence[str]) -> tuple[Ints, Ints]:
    """Return an order that brings equal keys together, and where each group begins, in order of appearance."""
    before = np.lexsort([array_of(rows[name]) for name in reversed(order_by)]) if order_by else np.arange(len(rows))
    code, groups = np.zeros(len(rows), np.int64), 1
    for key in keys:
        known = encoded(rows[key] if not rows[key].null_count else _text(rows[key]).dictionary_encode("encode"))
        words = max(len(known.dictionary), 1)
        present, code = numbered(code * words + array_of(known.indices), groups * words)
        groups = max(len(present), 1)
    _, first, code = np.unique(code[before], return_index=True, return_inverse=True)
    code = np.argsort(np.argsort(first))[code]
    order = np.argsort(code, kind="stable")
    return before[order], np.flatnonzero(np.diff(code[order], prepend=-1)).astype(np.int64)


def _text(column: Any) -> Any:
    """Return words as text; other columns as they are."""
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _histograms(rows: Any, starts: Ints) -> dict[str, Any]:
    lists = rows["hist_counts"].combine_chunks()
    lists = pa.concat_arrays(lists.chunks) if isinstance(lists, pa.ChunkedArray) else lists
    valid = lists.is_valid().to_numpy(zero_copy_only=False)
    taken = np.logical_and.reduceat(valid, starts) if len(rows) else valid
    lists = lists.fill_null([]) if lists.null_count else lists
    offsets = rows["hist_offset"].to_numpy(zero_copy_only=False)
    merged = merge_histograms(
        np.nan_to_num(offsets).astype(np.int64),
        lists.offsets.to_numpy().astype(np.int64),
        lists.values.to_numpy().astype(np.int64),
        starts,
    )
    kept = [pair if whole else (None, None) for pair, whole in zip(merged, taken, strict=True)]
    return {
        "hist_offset": pa.array([offset for offset, _ in kept], pa.int32()),
        "hist_counts": pa.array([counts for _, counts in kept], pa.list_(pa.int64())),
    }
