"""What is kept of a tensor: every token, every sample, a pooled vector, the largest elements, or a function's answer.

Each is a `Keep`: it is given the tensor of one site and the batch, and returns rows. To add one, write a frozen
dataclass with `rows`; its fields are its part of the harvest's fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tensortap import text
from tensortap.errors import HarvestError
from tensortap.harvest.batch import InputBatch, Key
from tensortap.harvest.fingerprints import fingerprint_of_function
from tensortap.harvest.plan import checked_seed
from tensortap.harvest.rows import Array, Ints, KeptRows, mixed

How = Literal["mean", "max", "last", "first"]
KeepFunction = Callable[[Array, InputBatch], Array]


@dataclass(frozen=True)
class Keep:
    """Choose rows of a tensor."""

    def rows(self, values: Array, batch: InputBatch, token_ids: Key) -> KeptRows:
        """Return the rows that are kept of a tensor whose first dimension is the batch's."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return what is kept as text: two harvests can be joined only if it is the same."""
        return repr(self)


@dataclass(frozen=True)
class Tokens(Keep):
    """A row for every token."""

    mask: Key | None = None
    positions: tuple[int, ...] | None = None
    share: float = 1.0
    seed: int = 0
    axis: int | None = None

    def rows(self, values: Array, batch: InputBatch, token_ids: Key) -> KeptRows:
        """Return a row for each position that the mask, the positions and the share leave."""
        grid = as_grid(values, self.axis)
        count, length, width = grid.shape
        wanted = np.ones((count, length), bool) if self.mask is None else mask_of(batch, self.mask, (count, length))
        if self.positions is not None:
            wanted &= _chosen(self.positions, wanted)
        sample, position = np.nonzero(wanted)
        if self.share < 1.0:
            random = mixed(self.seed, batch.samples[sample], position) >> np.uint64(11)
            few = random < np.uint64(int(self.share * (1 << 53)))
            sample, position = sample[few], position[few]
        ids = batch.token_ids(token_ids)
        token = ids[sample, position] if ids is not None and ids.shape == (count, length) else np.full(len(sample), -1)
        everything = len(sample) == count * length
        kept = grid.reshape(-1, width) if everything else grid[sample, position]
        return KeptRows(kept, batch.samples[sample], position.astype(np.int64), token.astype(np.int64))


@dataclass(frozen=True)
class Samples(Keep):
    """A row for every sample: all that the site gives for it, in one vector."""

    def rows(self, values: Array, batch: InputBatch, token_ids: Key) -> KeptRows:
        """Return each sample's values as one vector."""
        return of_samples(values.reshape(len(values), -1), batch)


@dataclass(frozen=True)
class Pooled(Keep):
    """A row for every sample: one vector made of those of its tokens."""

    how: How = "mean"
    mask: Key | None = None
    axis: int | None = None

    def rows(self, values: Array, batch: InputBatch, token_ids: Key) -> KeptRows:
        """Return the mean, the largest, the first or the last vector of each sample that has a token."""
        grid = as_grid(values, self.axis)
        count, length, _ = grid.shape
        mask = np.ones((count, length), bool) if self.mask is None else mask_of(batch, self.mask, (count, length))
        some = np.flatnonzero(mask.any(axis=1))
        return of_samples(self._pooled(grid[some], mask[some]), batch, some)

    def _pooled(self, grid: Array, mask: Array) -> Array:
        if self.how in ("first", "last"):
            at = mask.argmax(axis=1) if self.how == "first" else mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
            return np.asarray(grid[np.arange(len(grid)), at])
        wide = grid.astype(wide_type(grid))
        if self.how == "max":
            return np.asarray(np.where(mask[:, :, None], wide, -np.inf).max(axis=1, initial=-np.inf))
        total = np.where(mask[:, :, None], wide, 0.0).sum(axis=1, dtype=np.float64)
        return np.asarray((total / mask.sum(axis=1)[:, None]).astype(wide.dtype))


@dataclass(frozen=True)
class TopK(Keep):
    """Keep the `k` largest elements of every token, with their dimensions."""

    k: int
    mask: Key | None = None
    axis: int | None = None

    def rows(self, values: Array, batch: InputBatch, token_ids: Key) -> KeptRows:
        """Return the largest elements of each token, the largest first; equal ones in order of dimension."""
        rows = Tokens(self.mask, axis=self.axis).rows(values, batch, token_ids)
        if rows.values.shape[1] < self.k:
            raise HarvestError(f"top_k({self.k}) must have k of at most {rows.values.shape[1]}, the site's width")
        order = np.argsort(-rows.values.astype(wide_type(rows.values)), axis=1, kind="stable")[:, : self.k].astype(
            np.int32
        )
        largest = np.take_along_axis(rows.values, order, axis=1)
        return KeptRows(largest, rows.sample, rows.position, rows.token, order)


@dataclass(frozen=True)
class FunctionOf(Keep):
    """KeptRows of what a function makes of the tensor."""

    function: KeepFunction

    def rows(self, values: Array, batch: InputBatch, token_ids: Key) -> KeptRows:
        """Call the function; its answer has a first dimension for the samples, and may have one for positions."""
        made = np.asarray(self.function(values.copy(), batch))  # it may change them, and the model goes on with its own
        if made.ndim < 2 or made.shape[0] != len(batch.samples):
            raise HarvestError(
                f"keep={_name(self.function)} must return [samples, ..., width] with {len(batch.samples)} samples, "
                f"got {text.shape(made.shape)}"
            )
        return Tokens().rows(made, batch, token_ids)

    def describe(self) -> str:
        """Return the function's name and a hash of what it does."""
        return fingerprint_of_function(self.function)


def tokens(
    mask: Key | None = None,
    *,
    positions: int | Sequence[int] | None = None,
    share: float = 1.0,
    seed: int = 0,
    axis: int | None = None,
) -> Keep:
    """Keep a row for every token: for every position that the mask (a name in the batch) does not leave out.

    >>> tokens(mask="attention_mask", positions=[0, -1]).describe()
    "Tokens(mask='attention_mask', positions=(0, -1), share=1.0, seed=0, axis=None)"

    `positions` keeps some of them, counted from the end of each sample's own tokens when negative; `share` a random
    share, the same for the same seed however the data is batched. `axis` is the dimension of the features where it is
    not the last, as in images: `tokens(axis=1)`.
    """
    if not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
        raise HarvestError(f"share must be between 0 and 1, got {share!r}: write tokens(share=0.1)")
    if isinstance(positions, (int, np.integer)):
        positions = (int(positions),)
    if positions is not None and not all(isinstance(each, (int, np.integer)) for each in positions):
        raise HarvestError(f"positions must be numbers, got {positions!r}: write tokens(positions=[0, -1])")
    chosen = None if positions is None else tuple(int(each) for each in positions)
    return Tokens(_checked_mask(mask), chosen, float(share), checked_seed(seed), _checked_axis(axis))


def samples() -> Keep:
    """Keep one row for every sample, with everything that the site gives for it."""
    return Samples()


def pooled(how: How = "mean", *, mask: Key | None = None, axis: int | None = None) -> Keep:
    """Keep one row for every sample: the mean, the largest ("max"), the first or the last of its tokens."""
    if how not in ("mean", "max", "last", "first"):
        raise HarvestError(f'pooled must be "mean", "max", "first" or "last", got {how!r}')
    return Pooled(how, _checked_mask(mask), _checked_axis(axis))


def top_k(k: int, *, mask: Key | None = None, axis: int | None = None) -> Keep:
    """Keep the `k` largest elements of every token, and which dimensions they are."""
    if not isinstance(k, int) or k < 1:
        raise HarvestError(f"k must be at least 1, got {k!r}: write top_k(32)")
    return TopK(k, _checked_mask(mask), _checked_axis(axis))


def as_keep(keep: Keep | KeepFunction | None) -> Keep:
    """Return what the user's `keep=` means."""
    if keep is None:
        return Tokens()
    if isinstance(keep, Keep):
        return keep
    ours: list[Any] = [tokens, samples, pooled, top_k]
    if any(keep is each for each in ours):
        raise HarvestError(f"keep must be what tt.{_name(keep)}() returns, got the function itself: call it")
    if callable(keep):
        return FunctionOf(keep)
    raise HarvestError(
        f"keep must be tokens(), samples(), pooled(), top_k() or a function, got {keep!r}: write "
        'keep=tt.tokens(mask="attention_mask")'
    )


def as_grid(values: Array, axis: int | None) -> Array:
    """Return a tensor as [samples, positions, width]."""
    if values.ndim > 3 and axis is None:
        raise HarvestError(
            f"a tensor of {text.shape(values.shape)} has several dimensions that may hold the features: write "
            "keep=tt.tokens(axis=1) for channels first, axis=-1 for channels last, or keep=tt.samples()"
        )
    if axis is not None and values.ndim > 2 and not (0 < axis < values.ndim or -values.ndim < axis < 0):
        raise HarvestError(f"axis must be one of 1 to {values.ndim - 1} of {text.shape(values.shape)}, got {axis}")
    moved = np.moveaxis(values, axis, -1) if axis is not None and values.ndim > 2 else values
    return moved.reshape(len(moved), -1, moved.shape[-1]) if moved.ndim > 1 else moved.reshape(len(moved), 1, 1)


def wide_type(values: Array) -> np.dtype[Any]:
    """Return the type to compute in: float32, and float64 for what float32 cannot hold."""
    return np.promote_types(values.dtype, np.float32)


def mask_of(batch: InputBatch, key: Key, shape: tuple[int, int]) -> Array:
    """Return the batch's mask for a tensor of so many samples and positions."""
    mask = batch.entry(key)
    if mask.shape != shape:
        raise HarvestError(
            f"the mask {key!r} of {text.shape(mask.shape)} does not fit {shape[0]} samples with {shape[1]} positions: "
            "name the mask of these positions, tokens(mask=...), or leave it out; where each item of the data is one "
            "sample and no batch, write batch_size=32"
        )
    return np.asarray(mask != 0)


def of_samples(values: Array, batch: InputBatch, some: Ints | None = None) -> KeptRows:
    """Return a row for each sample, or for some of them."""
    sample = batch.samples if some is None else batch.samples[some]
    none = np.full(len(sample), -1, np.int64)
    return KeptRows(values, sample, none, none)


def _chosen(positions: tuple[int, ...], mask: Array) -> Array:
    """Return which cells the positions mean; those from the end are counted over a sample's own tokens."""
    rank = np.where(mask, np.cumsum(mask, axis=1) - 1, -1)
    total = mask.sum(axis=1, keepdims=True)
    found = np.zeros(mask.shape, bool)
    for position in positions:
        found |= mask & (rank == (total + position if position < 0 else position))
    return found


def _checked_mask(mask: Any) -> Key | None:
    if mask is not None and (isinstance(mask, bool) or not isinstance(mask, (str, int))):
        raise HarvestError(
            f"mask must be the name or the place of an entry of the batch, got {str(mask)[:80]}: write "
            'mask="attention_mask"'
        )
    return mask


def _checked_axis(axis: Any) -> int | None:
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, (int, np.integer))):
        raise HarvestError(f"axis must be the number of a dimension, got {axis!r}: write axis=1 for channels first")
    return None if axis is None else int(axis)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
