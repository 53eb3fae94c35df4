"""Show one place in detail: its statistics over steps, its distribution, its last record, its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.reduce.statistics import NONFINITE, NUMBERS
from tensortap.sinks.plain import plain
from tensortap.store import facts
from tensortap.store.snapshot import Snapshot, Triple
from tensortap.view.api.about import akin, site_name, slots, triple_of
from tensortap.view.api.bins import StepBins, bins_for, edges
from tensortap.view.api.distribution import ROWS, Floats, distribution
from tensortap.view.api.grid import Ints, as_floats
from tensortap.view.api.query import Query, RequestError
from tensortap.view.api.ranks import SPREAD
from tensortap.view.api.rows import SHAPE, ReadColumns, of_place
from tensortap.view.api.wire import ColumnAnswer

HISTOGRAMS: Final = 10_000  # beyond so many steps only every n-th histogram is read
TENSORS: Final = 1000
_NUMBERS: Final = ("step", "rank", "call", *NUMBERS)
_OF_SHAPE: Final = ("step", "zeros", "min", "max", *SHAPE)
_RECORD: Final = ("step", "phase", "rank", "call", "seq", "op", "dtype", "shape", *NUMBERS,
                  "reason", "numbers", "time")  # fmt: skip
COLUMNS: Final = tuple(dict.fromkeys((*_NUMBERS, *SHAPE, *_RECORD)))
_MEANS: Final = ("mean", "std", "l2")


def site(
    snapshot: Snapshot, query: Query, kept: Mapping[Triple, list[dict[str, Any]]], read: ReadColumns | None = None
) -> ColumnAnswer:  # fmt: skip
    """Describe one place. Takes `site`, `from`, `to`, `width`, `buckets`, and `call` or `rank` for one of several."""
    place = triple_of(snapshot, query.text("site"))
    read = read or of_place(snapshot, place)
    low, high = query.span(snapshot.steps)
    bins = bins_for(low, high, query.width)
    low, high = bins.steps(len(snapshot.steps))
    if low >= high:
        raise RequestError("no step was recorded in this range", "choose another range, or the whole run")
    rows, shapes = _read(read, snapshot, query, low, high)
    header = _about(read, snapshot, place, rows) | {**_some(kept.get(place, [])), "level": bins.level}
    header["record"] = _with_line(header["record"], snapshot, place)
    rows = _only(rows, query)
    columns: dict[str, npt.NDArray[Any]] = {"step": edges(bins, snapshot.steps)[: bins.size]}
    columns |= _statistics(rows, _bin_of(rows, snapshot, bins), bins.size)
    if len(shapes):
        columns |= distribution(shapes, _bin_of(shapes, snapshot, bins), bins.size, _buckets(query))
    return ColumnAnswer({**header, "histogram": len(shapes) > 0, "every": _stride(high - low)}, columns)


def _buckets(query: Query) -> int:
    return int(min(max(query.number("buckets", ROWS), 8), ROWS))


def _some(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the kept tensors to choose from; of very many, evenly spread ones, the last among them."""
    every = -(-len(tensors) // TENSORS) or 1
    return {"tensors": tensors[::-1][::every][::-1], "tensors_total": len(tensors)}


def _read(read: ReadColumns, snapshot: Snapshot, query: Query, low: int, high: int) -> tuple[Any, Any]:
    """Return the numbers of all records, and the histograms of as many as are to be had in memory, in one pass."""
    numbers, shapes, stride = [], [], _stride(high - low)
    for a in range(low, high, HISTOGRAMS):
        last = int(snapshot.steps[min(a + HISTOGRAMS, high) - 1])
        rows = read((*_NUMBERS, *SHAPE), int(snapshot.steps[a]), last)
        numbers.append(rows.select(_NUMBERS))
        with_shape = _only(rows, query).select(_OF_SHAPE)
        with_shape = with_shape.filter(pc.is_valid(with_shape["hist_counts"]))
        shapes.append(with_shape if stride == 1 else with_shape.take(np.arange(0, len(with_shape), stride)))
    return pa.concat_tables(numbers), pa.concat_tables(shapes)


def _stride(steps: int) -> int:
    """Return n, where every n-th histogram of so many steps is read."""
    return -(-steps // HISTOGRAMS)


def _only(rows: Any, query: Query) -> Any:
    for name in ("call", "rank"):
        wanted = None if query.text(name) == SPREAD else query.number(name)
        if wanted is not None:
            rows = rows.filter(pc.equal(rows[name], wanted))
    return rows


def _bin_of(rows: Any, snapshot: Snapshot, bins: StepBins) -> Ints:
    found: Ints = (np.searchsorted(snapshot.steps, rows["step"].to_numpy()) >> bins.level) - bins.first
    return found


def _statistics(rows: Any, bin_of: Ints, count: int) -> dict[str, npt.NDArray[Any]]:
    """Return each bin's means with their extremes, least minimum, greatest maximum, and what was not finite."""
    known = {name: rows[name].to_numpy() for name in _NUMBERS[3:]}
    known["zeros"] = known["zeros"] / np.maximum(known["numel"], 1)
    known["nonfinite"] = np.asarray(sum(known[name] for name in NONFINITE), np.float64)
    nothing = (known["nonfinite"] >= known["numel"]) & (known["numel"] > 0)  # sums over no element are 0, and no value
    for name in (*_MEANS, "zeros"):
        known[name] = np.where(nothing, np.nan, np.asarray(known[name], np.float64))
    bins = RowsInBins(bin_of)
    out: dict[str, Floats] = {
        name: _per_bin(np.add, known[name], bins, count, mean=True) for name in (*_MEANS, "zeros")
    }
    if len(np.unique(bin_of)) < len(bin_of):
        for name in _MEANS:
            out[f"{name}.low"] = _per_bin(np.fmin, known[name], bins, count)
            out[f"{name}.high"] = _per_bin(np.fmax, known[name], bins, count)
    out |= {name: _per_bin(fold, known[name], bins, count) for name, fold in (("min", np.fmin), ("max", np.fmax))}
    out["nonfinite"] = _per_bin(np.add, known["nonfinite"], bins, count)
    return dict(zip(out, as_floats(np.stack(list(out.values()))), strict=True))


class RowsInBins:
    """Rows that are sorted by bin: the bin of each, where each bin begins and how many rows it has."""

    def __init__(self, bin_of: Ints) -> None:
        self.bin_of = bin_of
        self.starts: Ints = np.flatnonzero(np.diff(bin_of, prepend=-1))
        self.sizes: Ints = np.diff(np.append(self.starts, len(bin_of)))
        self.bins: Ints = bin_of[self.starts]


def _per_bin(
    fold: np.ufunc, values: npt.NDArray[Any], bins: RowsInBins, count: int, mean: bool = False
) -> Floats:  # fmt: skip
    out, values = np.full(count, np.nan), np.asarray(values, np.float64)
    missing = np.isnan(values)
    if missing.any():
        values, bins = values[~missing], RowsInBins(bins.bin_of[~missing])
    if len(values):
        with np.errstate(over="ignore"):
            out[bins.bins] = fold.reduceat(values, bins.starts) / (bins.sizes if mean else 1)
    return out


def _about(read: ReadColumns, snapshot: Snapshot, place: Triple, rows: Any) -> dict[str, Any]:
    """Return the last record, and the places beside this one."""
    calls, ranks = (sorted(pc.unique(rows[name]).to_pylist()) for name in ("call", "rank"))
    return {
        "site": site_name(place), "version": snapshot.version, "calls": calls, "ranks": ranks,
        "slots": slots(snapshot, place),
        "siblings": [site_name(triple) for triple in akin(snapshot, place)],
        "record": _last_record(read, rows),
    }  # fmt: skip


def _with_line(record: dict[str, Any] | None, snapshot: Snapshot, place: Triple) -> dict[str, Any] | None:
    """Return an operation's record tells the line of the watched code too."""
    line = facts.lines(snapshot).get(place[0]) if record and record["op"] else None
    return {**record, "line": line} if record and line else record


def _last_record(read: ReadColumns, rows: Any) -> dict[str, Any] | None:
    if not len(rows):
        return None
    last = int(rows["step"][-1].as_py())
    record = read(_RECORD, last, last)[-1:].to_pylist()[0]
    record["time"] = record["time"].isoformat() if record["time"] else None
    record["numbers"] = dict(record["numbers"] or ())
    found: dict[str, Any] = plain(record)
    return found
