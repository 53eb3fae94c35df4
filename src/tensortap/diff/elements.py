"""Find the elements that two runs kept of a tensor, and where in the tensor they lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.diff.align import channels_last
from tensortap.record.step import Record
from tensortap.reduce.reducers import sample_indices
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot
from tensortap.store.tensor_index import TensorEntry, kept_tensors
from tensortap.store.tensors import TensorKey
from tensortap.types import Place

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]
Call = tuple[int, int, Place, int, str]  # step, rank, place, call, phase
KINDS: Final = ("full", "rows", "sample")  # those with the most information first
_ROWS: Final = re.compile(r"Rows\(indices=\((.*?),?\)\)")
_SAMPLE: Final = re.compile(r"Sample\(n=(\d+), seed=(-?\d+)(, place='')?\)")


class CommonElements(NamedTuple):
    """Elements that both runs kept of a tensor, in the same order, and by which kind of reducer."""

    kind: str
    a: Array
    b: Array


class KeptElements:
    """The elements that a run kept of its tensors, listed once."""

    def __init__(self, run: Run, snapshot: Snapshot) -> None:
        self._run = run
        self._probes: Sequence[Mapping[str, Any]] = snapshot.run_json.get("probes") or ()
        self.framework = str((snapshot.run_json.get("model") or {}).get("framework", ""))
        self._kept: dict[Call, TensorEntry] = {}
        for kept in kept_tensors(snapshot):
            key = kept.key
            if not key.recomputed and key.kind in KINDS:
                call = (key.step, key.rank, key.place, key.call, key.phase)
                self._kept[call] = min(self._kept.get(call, kept), kept, key=_rank_of_kind)

    def calls(self) -> Iterable[Call]:
        """Return the calls with kept elements."""
        return self._kept.keys()

    def best(self, call: Call) -> TensorEntry | None:
        """Return the kept elements with the most information about one tensor; None if nothing was kept."""
        return self._kept.get(call) or self._kept.get((*call[:4], ""))  # phases that share numbers are not noted

    def read(self, kept: TensorEntry) -> Array:
        """Return the elements as one row."""
        return self._run.read_kept(kept).reshape(-1)

    def positions(self, key: TensorKey, array: Array, shape: tuple[int, ...]) -> Positions | None:
        """Return the positions of the elements in the flat tensor; None if the run does not tell."""
        numel = int(np.prod(shape, dtype=np.int64))
        if key.kind == "full":
            return np.arange(numel) if array.size == numel else None
        probe = self._probes[key.probe] if key.probe < len(self._probes) else {}
        reducers = [reducer for reducer in reducers_of(probe) if reducer.get("kind") == key.kind]
        found = [_positions(reducer, key, shape) for reducer in reducers]
        fitting = [positions for positions in found if positions.size == array.size]
        return fitting[0] if len(fitting) == 1 else None


def call_of(record: Record) -> Call:
    """Return the step, place and call of a record."""
    return record.step, record.rank, record.place._replace(op=""), record.call, record.phase or ""


def _rank_of_kind(kept: TensorEntry) -> int:
    return KINDS.index(kept.key.kind)


def reducers_of(probe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the reducers of a probe in `run.json`: `reducers`, or in version 1 the texts of `keep`.

    >>> reducers_of({"keep": ["Rows(indices=(0, -1))", "Sample(n=3, seed=0)"]})
    [{'kind': 'rows', 'indices': [0, -1]}, {'kind': 'sample', 'n': 3, 'seed': 0}]
    """
    if "reducers" in probe:
        return [reducer for reducer in probe["reducers"] if isinstance(reducer, dict)]
    texts = dict.fromkeys(map(str, probe.get("keep") or ()))
    return [reducer for text in texts for reducer in _parsed(text)]


def _parsed(text: str) -> Iterator[dict[str, Any]]:
    """Yield the reducers in a text that version 1 wrote: a repr."""
    if found := _ROWS.fullmatch(text):
        yield {"kind": "rows", "indices": [int(index) for index in found[1].split(",") if index.strip()]}
    if found := _SAMPLE.fullmatch(text):
        yield {"kind": "sample", "n": int(found[1]), "seed": int(found[2])} | ({"place": ""} if found[3] else {})


def _positions(reducer: Mapping[str, Any], key: TensorKey, shape: tuple[int, ...]) -> Positions:
    if key.kind == "sample":
        return sample_indices(reducer["n"], reducer["seed"], reducer.get("place", str(key.place)), shape)
    size = shape[0] if shape else 0
    chosen = [i % size for i in reducer["indices"] if -size <= i < size]
    width = int(np.prod(shape[1:], dtype=np.int64))
    return (np.array(chosen, np.int64)[:, None] * width + np.arange(width)).reshape(-1)


def common_elements(
    a: KeptElements, b: KeptElements, call_a: Call, call_b: Call, shape: tuple[int, ...], shape_b: tuple[int, ...]
) -> CommonElements | None:
    """Return the elements kept in both runs of a tensor, in the same order; None when there are none.

    Of tensors with channels first in one run and last in the other, those of `full()`.
    """
    first, second = a.best(call_a), b.best(call_b)
    if first is None or second is None:
        return None
    x, y = a.read(first), b.read(second)
    if first.key.kind == second.key.kind == "full":
        known = shape == shape_b and a.framework == b.framework
        return _whole(x, y, shape, shape_b, order_known=known) if x.size == y.size else None
    if shape != shape_b:
        return None
    at_x, at_y = a.positions(first.key, x, shape), b.positions(second.key, y, shape)
    if at_x is None or at_y is None:
        return None
    _, in_x, in_y = np.intersect1d(at_x, at_y, return_indices=True)
    kind = max(first.key.kind, second.key.kind, key=KINDS.index)
    return CommonElements(kind, x[in_x], y[in_y]) if in_x.size else None


def _whole(
    x: Array, y: Array, shape: tuple[int, ...], shape_b: tuple[int, ...], *, order_known: bool
) -> CommonElements | None:
    """Return all elements in one order.

    Channels may be first in one framework and last in the other. Where as many channels as rows and columns leave that
    open, the order counts in which more elements agree.
    """
    if order_known or (shape == shape_b and len(shape) < 3):
        return CommonElements("full", x, y)
    orders = [CommonElements("full", x, y)] if shape == shape_b else []
    if channels_last(shape) == shape_b:
        orders.append(CommonElements("full", _channels_moved(x, shape), y))
    if channels_last(shape_b) == shape:
        orders.append(CommonElements("full", x, _channels_moved(y, shape_b)))
    return min(orders, key=_distance) if len(orders) > 1 else orders[0] if orders else None


def _channels_moved(values: Array, shape: tuple[int, ...]) -> Array:
    return np.moveaxis(values.reshape(shape), 1, -1).reshape(-1)


def _distance(common: CommonElements) -> float:
    x, y = (values.astype(np.complex128 if values.dtype.kind == "c" else np.float64) for values in common[1:])
    apart = np.abs(x - y)
    return float(np.sum(apart, where=np.isfinite(apart)))
