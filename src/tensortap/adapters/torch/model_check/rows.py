"""Find which rows of a tensor changed, on whichever axis the rows are, even if the batch was merged with other axes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def leak(before: Tensor, after: Tensor, count: int, kept: Tensor) -> float | None:
    """Return by how much rows that should be the same have changed, relative to the tensor's size.

    `kept` marks which of `count` rows should be the same. Rows may lie on any axis, and be merged with others: what
    counts is the arrangement in which least has changed. None where no axis can hold the rows, 0.0 for no change.

    >>> import torch
    >>> a, b = torch.ones(2, 3), torch.tensor([[1.0, 1, 1], [2, 2, 2]])
    >>> leak(a, b, 2, torch.tensor([True, False])), leak(a, b, 2, torch.tensor([True, True]))
    (0.0, 1.0)
    """
    if before.shape != after.shape or not before.is_floating_point():
        return None
    changes = _changes(before, after)
    kept = kept.to(changes.device)
    found = [float(rows[kept].max()) if bool(kept.any()) else 0.0 for rows in _by_row(changes, count)]
    found += _of_pairs(changes, count, kept)
    return min(found) if found else None


def one_row_changed(before: Tensor, after: Tensor, count: int) -> bool:
    """Return whether one row of `count` changed, whichever it is: the model has put its rows in another order.

    >>> import torch
    >>> a = torch.arange(6.0).reshape(3, 2)
    >>> b = a.clone()
    >>> b[2] = 9
    >>> one_row_changed(a, b, 3), one_row_changed(a, a + 1, 3)
    (True, False)
    """
    changes = _changes(before, after)
    return any(int((rows > 0).sum()) <= 1 for rows in _by_row(changes, count))


def _changes(before: Tensor, after: Tensor) -> Tensor:
    """Return the size of each element's change, relative to the whole tensor; changes that rounding explains
    are zero.
    """
    a, b = before.double(), after.double()
    same = (a == b) | (a.isnan() & b.isnan())
    finite = a[a.isfinite()]
    scale = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    changes = ((a - b).abs() / (scale or 1.0)).nan_to_num(nan=1.0, posinf=1.0)
    return torch.where(same | (changes <= torch.finfo(before.dtype).eps ** 0.5), 0.0, changes)


def _by_row(changes: Tensor, count: int) -> Iterator[Tensor]:
    """Yield the largest change of each row, for every axis that may hold the rows, alone or merged with another."""
    for axis, length in enumerate(changes.shape):
        if length and length % count == 0:
            rest = length // count
            for shape, at in (((count, rest), axis), ((rest, count), axis + 1))[: 1 if rest == 1 else 2]:
                split = changes.reshape(*changes.shape[:axis], *shape, *changes.shape[axis + 1 :])
                others = tuple(i for i in range(split.dim()) if i != at)
                yield split.amax(others) if split.numel() else split.new_zeros(count)


def _of_pairs(changes: Tensor, count: int, kept: Tensor) -> list[float]:
    """Return the largest change among rows that should be the same, of a tensor over pairs of rows."""
    axes = [axis for axis, length in enumerate(changes.shape) if length == count]
    if len(axes) < 2:
        return []
    for axis in axes:
        changes = changes.index_select(axis, kept.nonzero()[:, 0])
    return [float(changes.max()) if changes.numel() else 0.0]


def exchanged(tensor: Tensor, axis: int, places: Tensor, source: Tensor) -> Tensor:
    """Return a tensor whose rows at `places` are those of `source`; where that changes nothing, other values."""
    rows = tensor.index_select(axis, places)
    other = tensor.index_select(axis, source)
    if torch.equal(rows, other):
        other = _other_values(rows, tensor)
    return tensor.index_copy(axis, places, other)


def _other_values(rows: Tensor, tensor: Tensor) -> Tensor:
    if rows.is_floating_point() or rows.is_complex():
        return rows * 1.5 + 0.5
    values = torch.unique(tensor)
    if len(values) < 2:
        return rows if rows.dtype == torch.bool or not bool((values > 1).all()) else rows - 1
    other: Tensor = values[(torch.searchsorted(values, rows.contiguous()) + 1) % len(values)]
    return other
