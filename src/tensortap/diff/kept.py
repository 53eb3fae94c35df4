"""The elements that a run kept of its tensors, and where in the tensor they lie."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.diff.align import channels_last
from tensortap.reduce.reducers import sample_indices
from tensortap.store.run import Run
from tensortap.store.tensor_index import Held
from tensortap.store.tensors import TensorKey
from tensortap.types import Place

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]
Where = tuple[int, Place, int]  # rank, place, call
KINDS: Final = ("full", "rows", "sample")  # the more telling first
_ROWS: Final = re.compile(r"Rows\(indices=\((.*?),?\)\)")
_SAMPLE: Final = re.compile(r"Sample\(n=(\d+), seed=(-?\d+)(, place='')?\)")


class Part(NamedTuple):
    """Elements in common: of which kind, out of both runs."""

    kind: str
    a: Array
    b: Array


class Shelf:
    """What was kept at one step of a run, by rank, place and call."""

    def __init__(self, run: Run, step: int) -> None:
        self._run = run
        self._probes: Sequence[Mapping[str, Any]] = run.info.get("probes") or ()
        self._held: dict[Where, list[Held]] = {}
        for held in run.kept(step):
            key = held.key
            if not key.recomputed and key.kind in KINDS:
                self._held.setdefault((key.rank, key.place, key.call), []).append(held)

    def find(self, where: Where) -> list[Held]:
        """What was kept of one tensor, the most telling first."""
        return sorted(self._held.get(where, ()), key=lambda held: KINDS.index(held.key.kind))

    def read(self, held: Held) -> Array:
        """The elements; looked for again when a live run has moved them meanwhile."""
        try:
            return held.read()
        except FileNotFoundError:
            found = self._run.tensors(steps=held.key.step)
            return next(array for key, array in found if key == held.key)

    def positions(self, key: TensorKey, array: Array, shape: tuple[int, ...]) -> Positions | None:
        """Where the elements lie in the flat tensor; None when the run does not say."""
        numel = int(np.prod(shape, dtype=np.int64))
        if key.kind == "full":
            return np.arange(numel) if array.size == numel else None
        said = " ".join(self._probes[key.probe]["keep"]) if key.probe < len(self._probes) else ""
        candidates = _rows(said, shape) if key.kind == "rows" else _samples(said, key, shape)
        fitting = [found for found in candidates if found.size == array.size]
        return fitting[0] if len(fitting) == 1 else None


def _rows(said: str, shape: tuple[int, ...]) -> Iterator[Positions]:
    """Of every `rows([...])` of a probe."""
    for found in _ROWS.finditer(said):
        size = shape[0] if shape else 0
        chosen = [i % size for i in map(int, found[1].split(",")) if -size <= i < size]
        width = int(np.prod(shape[1:], dtype=np.int64))
        yield (np.array(chosen, np.int64)[:, None] * width + np.arange(width)).reshape(-1)


def _samples(said: str, key: TensorKey, shape: tuple[int, ...]) -> Iterator[Positions]:
    """Of every `sample(n)` of a probe."""
    for n, seed, anywhere in set(_SAMPLE.findall(said)):
        yield sample_indices(int(n), int(seed), "" if anywhere else str(key.place), shape)


def common(
    a: Shelf, b: Shelf, where_a: Where, where_b: Where, shape: tuple[int, ...], shape_b: tuple[int, ...]
) -> Part | None:
    """The elements kept in both runs of a tensor, in the same order; None when there are none.

    Of tensors with channels first in one run and last in the other, those of `full()`.
    """
    found_a, found_b = a.find(where_a), b.find(where_b)
    if not found_a or not found_b:
        return None
    first, second = found_a[0], found_b[0]
    x, y = (shelf.read(held).reshape(-1) for shelf, held in ((a, first), (b, second)))
    if first.key.kind == second.key.kind == "full":
        return _whole(x, y, shape, shape_b) if x.size == y.size else None
    if shape != shape_b:
        return None
    at_x, at_y = a.positions(first.key, x, shape), b.positions(second.key, y, shape)
    if at_x is None or at_y is None:
        return None
    _, in_x, in_y = np.intersect1d(at_x, at_y, return_indices=True)
    kind = max(first.key.kind, second.key.kind, key=KINDS.index)
    return Part(kind, x[in_x], y[in_y]) if in_x.size else None


def _whole(x: Array, y: Array, shape: tuple[int, ...], shape_b: tuple[int, ...]) -> Part | None:
    if shape == shape_b:
        return Part("full", x, y)
    if channels_last(shape) == shape_b:
        return Part("full", np.moveaxis(x.reshape(shape), 1, -1).reshape(-1), y)
    if channels_last(shape_b) == shape:
        return Part("full", x, np.moveaxis(y.reshape(shape_b), 1, -1).reshape(-1))
    return None
