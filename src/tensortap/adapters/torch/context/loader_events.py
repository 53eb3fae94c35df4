"""Data loaders as they are iterated, as events."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tensortap.adapters.torch.context.batches import LoaderRecord
from tensortap.adapters.torch.context.caller import user_line
from tensortap.adapters.torch.context.sink import EventHub, guarded
from tensortap.adapters.torch.samples.batches import RecentBatches

_MOST_EPOCHS: Final = 40  # that are recorded one by one
_MOST_WORKERS: Final = 64


class WorkerStates:
    """Replace `worker_init_fn`: call it and write a hash of NumPy's random state into shared memory."""

    def __init__(self, own: Callable[[int], Any], count: int) -> None:
        self._own = own
        self._count = count
        self._memory = mmap.mmap(-1, 8 * count)

    def __call__(self, worker: int) -> Any:
        """Begin in a worker."""
        result = self._own(worker)
        with contextlib.suppress(Exception):
            numpy = sys.modules.get("numpy")
            state = random.getstate() if numpy is None else numpy.random.get_state()[1].tolist()
            digest = hashlib.blake2b(repr(state).encode(), digest_size=8).digest()
            self._memory[8 * worker : 8 * worker + 8] = digest
        return result

    def known(self) -> list[str]:
        """Return the hashes of workers that have begun."""
        found = [self._memory[8 * i : 8 * i + 8].hex() for i in range(self._count)]
        return [mark for mark in found if mark != "00" * 8]


class LoaderEvents:
    """Every loader of the process that is iterated."""

    def __init__(self, hub: EventHub) -> None:
        self.hub = hub
        self._loaders: dict[int, LoaderRecord] = {}
        self._last: LoaderRecord | None = None  # that gave a batch
        self._made = 0
        self._epochs = 0
        self._workers: list[tuple[WorkerStates, str]] = []
        self.recent = RecentBatches()
        self._lines: dict[int, str] = {}  # that made a loader, by the id of its sampler

    @guarded
    def loader_made(self, loader: Any) -> None:
        """Remember the line that makes a loader."""
        if len(self._lines) < 1000:
            self._lines[id(loader._index_sampler)] = user_line(3)

    @guarded
    def loader_started(self, loader: Any) -> None:
        """Note an epoch of a loader."""
        record = self._loaders.get(id(loader._index_sampler))
        if record is None or not record.of(loader):
            self._made += 1
            record = self._loaders[id(loader._index_sampler)] = LoaderRecord(loader, self._made)
        before = record.started()
        self._epochs += 1
        if record.epochs <= 3 or self._epochs <= _MOST_EPOCHS:
            self.hub.add("epoch", str(record.number), user_line(3), record.describe(loader) | {
                "epoch": record.epochs, **before,
                "made_at": self._lines.get(id(loader._index_sampler), ""),
            })  # fmt: skip

    @contextmanager
    def workers_start(self, loader: Any) -> Iterator[None]:
        """Make workers that run the user's code note their random state first; they are forked inside the block."""
        own, states = loader.worker_init_fn, None
        forked = loader.multiprocessing_context is None and multiprocessing.get_start_method(allow_none=True) != "spawn"
        if own is not None and 1 < loader.num_workers <= _MOST_WORKERS and forked and self.hub.active:
            states = WorkerStates(own, loader.num_workers)
            object.__setattr__(loader, "worker_init_fn", states)
        try:
            yield
        finally:
            if states is not None:
                object.__setattr__(loader, "worker_init_fn", own)
                self._workers.append((states, self._lines.get(id(loader._index_sampler), "")))

    @guarded
    def record_workers(self) -> None:
        """Add the random states that workers began with."""
        for states, line in self._workers[:4]:
            if known := states.known():
                self.hub.add("workers", "", line, {"states": known})

    @guarded
    def indices_drawn(self, iterator: Any, indices: Any) -> None:
        """Note the indices of a batch that a loader begins to read."""
        for record in self._loaders.values():
            record.draw(iterator, indices)

    @guarded
    def batch_given(self, iterator: Any, batch: Any) -> None:
        """Note that a loader has given its next batch."""
        for record in self._loaders.values():
            if record.give(iterator):
                self._last = record
                self.recent.add(record.last_batch(batch, getattr(iterator, "_dataset", None)))

    def samples_in(self, inputs: Any) -> dict[str, Any]:
        """Return the indices of the samples in a batch, if one loader drew as many."""
        first = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else None
        rows = first.shape[0] if isinstance(first, torch.Tensor) and first.dim() else None
        latest = () if self._last is None else (self._last,)
        for loader in (*latest, *self._loaders.values()):
            if loader.current and len(loader.current) == rows:
                return {"loader": loader.number, "epoch": loader.epochs, "indices": loader.current}
        return {}
