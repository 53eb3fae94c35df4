"""Show a kept tensor as a picture, shrunk to what a screen shows without losing its extremes; list what was kept."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.store.snapshot import Snapshot, Triple
from tensortap.store.tensor_index import DAMAGE, TensorRequest, read_one
from tensortap.store.tensors import TensorKey, TensorReader, key_of
from tensortap.types import Place
from tensortap.view.api.about import triple_of
from tensortap.view.api.grid import as_floats
from tensortap.view.api.query import Query, RequestError
from tensortap.view.api.wire import ColumnAnswer

MOST: Final = 512
LARGEST: Final = 64_000_000
Array = npt.NDArray[Any]
Entry = dict[str, Any]


def tensor(snapshot: Snapshot, query: Query, kept: Sequence[Mapping[str, Any]] = ()) -> ColumnAnswer:
    """Show a tensor: `site`, `step`, `call`, `keeper`, `index` of leading axes, windows `x`, `y` of the last two."""
    place, step = Place(*triple_of(snapshot, query.text("site"))), query.number("step")
    if step is None:
        raise RequestError("step must be the number of a step, got none", "write step=100")
    _check_size([item["shape"] for item in kept if item["step"] == step])
    rank, probe = query.number("rank"), query.number("probe")
    whole = read_one(
        snapshot, TensorRequest(place, step, query.number("call", 0), query.text("keeper") or None, rank, probe)
    )
    matrix, index = _matrix(whole, query)
    y, x = (query.window(name, size) for name, size in zip(("y", "x"), matrix.shape, strict=True))
    part = _real(matrix[slice(*y), slice(*x)])
    header = {
        "site": str(place), "step": step, "shape": whole.shape, "dtype": whole.dtype.name, "index": index,
        "axes": _axes(whole.ndim), "x": x, "y": y, "maps": _maps(whole.shape), "nonfinite": _bad(part),
    }  # fmt: skip
    return ColumnAnswer(header, shrunk(part))


def _check_size(shapes: list[list[int]]) -> None:
    """Refuse a tensor that is too large: it is read whole to show a part of it, and several may be asked for."""
    if any(math.prod(shape) > LARGEST for shape in shapes):
        raise RequestError(
            f"a tensor must have at most {LARGEST // 10**6} M elements to be shown as a picture, got more",
            "read it in Python: tt.open_run(run).tensor(site, step)",
        )


def _matrix(whole: Array, query: Query) -> tuple[Array, list[int]]:
    """Return the two last axes at an index of the others; fewer axes become one row."""
    if whole.ndim < 2:
        return whole.reshape(1, -1), []
    given = [part for part in query.text("index").split(",") if part]
    try:
        index = [int(part) for part in given] + [0] * (whole.ndim - 2 - len(given))
        return whole[tuple(index)], index
    except (ValueError, IndexError):
        sizes = ", ".join(map(str, whole.shape[:-2]))
        raise RequestError(
            f"index={query.text('index')} is not in this tensor", f"its leading axes are {sizes}"
        ) from None


def _real(part: Array) -> npt.NDArray[np.float64]:
    return np.abs(part).astype(np.float64) if part.dtype.kind == "c" else part.astype(np.float64)


def _bad(part: npt.NDArray[np.float64]) -> dict[str, int]:
    return {
        "nan": int(np.isnan(part).sum()),
        "posinf": int((part == np.inf).sum()),
        "neginf": int((part == -np.inf).sum()),
    }


def _axes(ndim: int) -> list[str]:
    """Return what the axes most likely are, for labels."""
    return {1: ["element"], 2: ["row", "column"], 3: ["sample", "position", "feature"],
            4: ["sample", "channel", "height", "width"]}.get(ndim, [f"axis {i}" for i in range(ndim)])  # fmt: skip


def _maps(shape: tuple[int, ...]) -> int:
    """Return how many maps there are to show side by side: channels of an image, heads of an attention."""
    return int(shape[1]) if len(shape) == 4 else 0


def shrunk(part: npt.NDArray[np.float64], most: int = MOST) -> dict[str, Array]:
    """Shrink to at most `most` × `most` cells: the mean of what is finite, with `low` and `high`; else +Inf.

    >>> {name: cells.tolist() for name, cells in shrunk(np.array([[0.0, 4.0, 1.0, 1.0]]), 2).items()}
    {'value': [[2.0, 1.0]], 'low': [[0.0, 1.0]], 'high': [[4.0, 1.0]]}
    """
    finite = np.isfinite(part)
    if max(part.shape, default=0) <= most:
        return {"value": np.where(finite, as_floats(np.where(finite, part, 0)), np.where(np.isnan(part), np.nan, part))
                .astype(np.float32)}  # fmt: skip
    starts = [np.unique(np.linspace(0, size, min(size, most), endpoint=False).astype(np.int64)) for size in part.shape]

    def folded(fold: Any, cells: Array) -> Array:
        cells = fold.reduceat(cells, starts[0], axis=0)
        return np.asarray(fold.reduceat(cells, starts[1], axis=1))

    count = folded(np.add, finite.astype(np.float64))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = folded(np.add, np.where(finite, part, 0)) / count
    low = folded(np.fmin, np.where(finite, part, np.nan))
    high = folded(np.fmax, np.where(finite, part, np.nan))
    value = np.where(count > 0, as_floats(mean), np.inf).astype(np.float32)
    return {"value": value, "low": as_floats(low), "high": as_floats(high)}


class KeptTensorIndex:
    """A run's kept tensors by place. Sealed files do not change, so each is read once."""

    def __init__(self) -> None:
        self._files: dict[str, list[tuple[TensorKey, Entry]]] = {}

    def by_place(self, snapshot: Snapshot) -> dict[Triple, list[Entry]]:
        """Return what was kept, by step, rank and call."""
        found: dict[Triple, dict[TensorKey, Entry]] = {}
        for key, entry in self._all(snapshot):
            if not key.recomputed:
                found.setdefault((key.site, key.port, key.slot), {})[key] = entry
        return {triple: [entries[key] for key in sorted(entries)] for triple, entries in found.items()}

    def _all(self, snapshot: Snapshot) -> Iterator[tuple[TensorKey, Entry]]:
        for files in snapshot.tensors:
            for name in files.names:
                yield from self._of_file(snapshot, name)
            for path in files.tails:
                yield from _of_tail(snapshot.tensor_rows(path))

    def _of_file(self, snapshot: Snapshot, name: str) -> list[tuple[TensorKey, Entry]]:
        if name not in self._files:
            try:
                with snapshot.files.open(name) as file:
                    reader = TensorReader(file)
                    said = [entry for _, entry in reader.entries.values()]
                    self._files[name] = [
                        (key, _entry(key, e)) for key, e in zip(reader.keys().values(), said, strict=True)
                    ]
            except FileNotFoundError:
                raise
            except DAMAGE as error:
                snapshot.catalog.mark_damaged(name, error)
                self._files[name] = []
        return self._files[name]


def _of_tail(table: Any) -> Iterator[tuple[TensorKey, Entry]]:
    if table is not None:
        for row in table.select(["entry", "dtype", "shape"]).to_pylist():
            with contextlib.suppress(*DAMAGE):  # the run counts it
                key = key_of(json.loads(row["entry"]))
                yield key, _entry(key, row)


def _entry(key: TensorKey, said: Any) -> Entry:
    return {
        "step": key.step, "rank": key.rank, "call": key.call, "keeper": key.kind, "probe": key.probe,
        "dtype": said["dtype"], "shape": list(said["shape"]),
    }  # fmt: skip
