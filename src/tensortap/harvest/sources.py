"""Data as numbered batches: whatever the user gives becomes a `Source`, which can read from any batch on."""

from __future__ import annotations

import inspect
import itertools
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tensortap.adapters.nested import values_in
from tensortap.errors import HarvestError
from tensortap.harvest.batch import InputBatch, TensorLike, size_of
from tensortap.harvest.collate import collated
from tensortap.harvest.fingerprints import fingerprint_of_samples
from tensortap.harvest.tables import ParquetRows, RayRows, expanded, parquet_paths

Collate = Callable[[list[Any]], Any]
DEFAULT_BATCH: Final = 32
MOST_KEPT: Final = 8  # batches that are read before the harvest begins, and kept for it
_SAMPLED: Final = 16  # samples of a data set that its fingerprint is made of


class Source:
    """Batches by number. Reading the same batches again gives the same values."""

    kind: str
    batches: int | None = None  # None: not known before the end
    expected: int | None = None  # how many batches there seem to be, for the progress bar alone

    def read(self, first: int, count: int) -> Iterator[InputBatch]:
        """Yield so many batches from the first on, fewer where the data ends."""
        raise NotImplementedError

    def peek(self, count: int = 1) -> Iterator[InputBatch]:
        """Yield the first batches, which are read again by `read`."""
        return self.read(0, count)

    def peek_at(self, number: int) -> InputBatch | None:
        """Return a batch that is read again by `read`; None where the data ends before it, or it costs too much."""
        return next(self.read(number, 1), None)

    def fingerprint(self) -> str:
        """Return a hash that tells other data from this."""
        raise NotImplementedError


class IndexedSource(Source):
    """Samples that can be asked for by number: a list, a torch or HF dataset, the rows of Parquet files."""

    def __init__(self, data: Any, batch_size: int, collate: Collate | None, kind: str) -> None:
        self.kind = kind
        self.data = data
        self._size = batch_size
        self._collate = collate or collated
        self._count = len(data)
        self.batches = self.expected = -(-self._count // batch_size)

    def read(self, first: int, count: int) -> Iterator[InputBatch]:
        """Yield batches of consecutive samples."""
        for number in range(first, min(first + count, self.batches or 0)):
            at = range(number * self._size, min((number + 1) * self._size, self._count))
            inputs = self._collated([self._sample(i) for i in at], at)
            yield InputBatch(inputs, np.arange(at.start, at.stop), number)

    def fingerprint(self) -> str:
        """Return a hash of the length and of samples from all over the data."""
        return fingerprint_of_samples(f"{self._count}", [self._sample(i) for i in _spread_over(self._count)])

    def _collated(self, samples: list[Any], at: range) -> Any:
        try:
            return self._collate(samples)
        except HarvestError as error:
            raise HarvestError(f"samples {at.start} to {at.stop - 1}: {error}") from error
        except Exception as error:
            error.add_note(f"while samples {at.start} to {at.stop - 1} of the data were put together")
            raise

    def _sample(self, number: int) -> Any:
        try:
            return self.data[number]
        except Exception as error:
            error.add_note(f"while sample {number} of the data was read")
            raise


class IterableSource(Source):
    """Batches that come one after another: a DataLoader, a generator, any iterable of batches."""

    kind = "batches"

    def __init__(
        self, make: Callable[[], Iterable[Any]], once: bool, expected: int | None = None,
        listed: Sequence[Any] | None = None,
    ) -> None:  # fmt: skip
        self._make = make
        self._once = once
        self._listed = listed  # the batches, where all of them are there
        self.expected = expected
        self._next = 0
        self._iterator: Iterator[InputBatch] = self._numbered(make())

    def read(self, first: int, count: int) -> Iterator[InputBatch]:
        """Yield batches; what comes before them is read and left out."""
        if first < self._next:
            self._again()
        for batch in self._iterator:
            if batch.number >= first:
                yield batch
            if batch.number + 1 >= first + count:
                return

    def peek(self, count: int = 1) -> Iterator[InputBatch]:
        """Yield the first batches and keep them for the harvest."""
        rest, seen = self._iterator, list[InputBatch]()
        for batch in itertools.islice(rest, count):
            seen.append(batch)
            self._iterator = self._followed([*seen], rest)
            self._next = 0
            yield batch

    def peek_at(self, number: int) -> InputBatch | None:
        """Return one of the first batches; none of the later, because all before it would have to be kept."""
        found = list(self.peek(number + 1)) if number < MOST_KEPT else []
        return found[number] if number < len(found) else None

    def fingerprint(self) -> str:
        """Return a hash of the length, where it is known, and of batches from all over a list; else of the first."""
        if self._listed is not None:
            return fingerprint_of_samples(
                f"{self.expected}", [self._listed[i] for i in _spread_over(len(self._listed))]
            )
        return fingerprint_of_samples(f"{self.expected}", [batch.inputs for batch in self.peek()])

    def _restart(self) -> None:
        self._next = 0
        self._iterator = self._numbered(self._make())

    def _again(self) -> None:
        if self._once:
            raise HarvestError("the data can be read only once: give a function that returns it, data=lambda: loader")
        self._restart()

    def _followed(self, heads: list[InputBatch], rest: Iterator[InputBatch]) -> Iterator[InputBatch]:
        while heads:
            self._next = heads[0].number + 1
            yield heads.pop(0)
        yield from rest

    def _numbered(self, batches: Iterable[Any]) -> Iterator[InputBatch]:
        sample = number = 0
        for inputs in batches:
            if not (size := size_of(inputs)):  # as a filter in a loader may leave: it has no number either
                continue
            self._next = number + 1
            yield InputBatch(as_inputs(inputs), np.arange(sample, sample + size), number)
            sample, number = sample + size, number + 1
        self.batches = number


def source_of(data: Any, batch_size: int | None = None, collate: Collate | None = None) -> Source:
    """Return the source of what a user calls data.

    An iterable of batches is taken as it comes. What has a length and can be indexed holds samples, which are put
    together `batch_size` at a time. Text names Parquet files. A function without arguments returns any of these.
    """
    if callable(data) and not isinstance(data, type) and not hasattr(data, "__iter__") and not hasattr(data, "__len__"):
        return _of_factory(data, batch_size, collate)
    size = DEFAULT_BATCH if batch_size is None else batch_size
    if type(data).__module__.startswith("ray.data"):
        return IndexedSource(RayRows(data), size, collate, "ray")
    if isinstance(data, (str, os.PathLike)) or _are_paths(data, collate):
        return IndexedSource(ParquetRows(parquet_paths(data)), size, collate, "parquet")
    if (instead := _instead_of(data)) is not None:
        raise HarvestError(
            f"data must be batches, a dataset or paths of Parquet files, got an object of type {type(data).__name__}"
            f"{instead}"
        )
    if _is_keras_dataset(data):
        return IterableSource(lambda: (data[i] for i in range(len(data))), once=False, expected=len(data))
    batches = _is_loader(data) or (batch_size is None and _holds_batches(data))
    if not batches and hasattr(data, "__getitem__") and hasattr(data, "__len__") and not _is_iterable_dataset(data):
        return IndexedSource(data, size, collate, "samples")
    once = isinstance(data, Iterator)
    if batch_size is not None and not batches:
        return IterableSource(lambda: _grouped(data, size, collate or collated), once)
    return IterableSource(lambda: data, once, _length(data), data if isinstance(data, (list, tuple)) else None)


def _instead_of(data: Any) -> str | None:
    """Return what to write instead of something that is not data; None for what may be."""
    if type(data).__module__.partition(".")[0] in ("pandas", "polars"):
        return ': give its rows, data.to_dict("records") in pandas and data.to_dicts() in Polars'
    if isinstance(data, Mapping):
        if any(values_in(dict(data), TensorLike, depth=1)):  # type: ignore[type-abstract]
            return ": for one batch write [data]"
        return f": choose one of its entries, data[{json.dumps(str(next(iter(data), 'train')))}]"
    return None if isinstance(data, Iterable) or hasattr(data, "__getitem__") else ""


def _is_iterable_dataset(data: Any) -> bool:
    """Return whether this is PyTorch's dataset that is only gone through: it has a __getitem__ that raises."""
    return any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__)


def _of_factory(data: Callable[[], Any], batch_size: int | None, collate: Collate | None) -> Source:
    try:
        inspect.signature(data).bind()
    except TypeError:
        raise HarvestError(f"data as a function must take no arguments, got {data!r}") from None
    made = data()
    if isinstance(made, Iterator):
        first = [made]

        def again() -> Iterable[Any]:
            items = first.pop() if first else data()
            return items if batch_size is None else _grouped(items, batch_size, collate or collated)

        return IterableSource(again, once=False)
    return source_of(made, batch_size, collate)


def checked_batch_size(size: Any) -> int | None:
    """Return how many samples make a batch, where it is said; HarvestError for what is no number."""
    if size is None:
        return None
    try:
        found = 0 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        found = 0
    if found < 1:
        raise HarvestError(f"batch_size must be a whole number of at least 1, got {size!r}: write batch_size=32")
    return found


def checked_collate(collate: Any) -> Collate | None:
    """Return a function that makes a batch of samples; HarvestError for what cannot be called."""
    if collate is not None and not callable(collate):
        raise HarvestError(f"collate must be a function from a list of samples to a batch, got {collate!r}")
    return collate  # type: ignore[no-any-return]


def as_inputs(inputs: Any) -> Any:
    """Return a loader's batch as the model is called with it: a list of tensors is a tuple of arguments."""
    return tuple(inputs) if isinstance(inputs, list) else inputs


def _spread_over(count: int) -> list[int]:
    """Return a few places from all over so many.

    >>> _spread_over(3), len(_spread_over(1000))
    ([0, 1, 2], 16)
    """
    return sorted({int(i) for i in np.linspace(0, count - 1, _SAMPLED)}) if count else []


def _grouped(samples: Iterable[Any], size: int, collate: Collate) -> Iterator[Any]:
    waiting: list[Any] = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == size:
            yield collate(waiting)
            waiting = []
    if waiting:
        yield collate(waiting)


def _length(data: Any) -> int | None:
    """Return how many batches there are, where the data says it: a list does, and most loaders do."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _is_loader(data: Any) -> bool:
    return hasattr(data, "batch_sampler") and hasattr(data, "collate_fn")


def _is_keras_dataset(data: Any) -> bool:
    """Return whether this is a Keras PyDataset, whose items are batches."""
    return any(kind.__name__ == "PyDataset" and kind.__module__.startswith("keras") for kind in type(data).__mro__)


def _holds_batches(data: Any) -> bool:
    """Return whether a list holds batches, not samples: its entries are dicts or tuples of tensors, or tensors."""
    if not isinstance(data, (list, tuple)) or not data:
        return False
    found = list(values_in(data[0], TensorLike))  # type: ignore[type-abstract]
    return bool(found) and all(len(value.shape) > 1 for _, value in found[:1])


def _are_paths(data: Any, collate: Collate | None) -> bool:
    """Return whether a list holds paths: texts, unless `collate` makes batches of texts and there is no such file."""
    texts = (
        isinstance(data, (list, tuple)) and bool(data) and all(isinstance(each, (str, os.PathLike)) for each in data)
    )
    return texts and (collate is None or bool(expanded(os.fspath(data[0]))))
