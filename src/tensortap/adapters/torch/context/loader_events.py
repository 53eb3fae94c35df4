"""Data loaders as they are iterated, as events."""

from __future__ import annotations

from typing import Any, Final

import torch

from tensortap.adapters.torch.context.batches import LoaderRecord
from tensortap.adapters.torch.context.caller import user_line
from tensortap.adapters.torch.context.sink import EventHub, guarded

_MOST_EPOCHS: Final = 40  # that are told one by one


class LoaderEvents:
    """Every loader of the process that is iterated."""

    def __init__(self, hub: EventHub) -> None:
        self.hub = hub
        self._loaders: dict[int, LoaderRecord] = {}
        self._made = 0
        self._epochs = 0
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
            self.hub.add("epoch", str(record.number), user_line(3), record.describe() | {
                "epoch": record.epochs, "batches_before": before,
                "made_at": self._lines.get(id(loader._index_sampler), ""),
            })  # fmt: skip

    @guarded
    def indices_drawn(self, iterator: Any, indices: Any) -> None:
        """Note the indices of a batch that a loader begins to read."""
        for record in self._loaders.values():
            record.draw(iterator, indices)

    @guarded
    def batch_given(self, iterator: Any) -> None:
        """Note that a loader has given its next batch."""
        for record in self._loaders.values():
            record.give(iterator)

    def samples_in(self, inputs: Any) -> dict[str, Any]:
        """Return the indices of the samples in a batch, where one loader drew as many."""
        first = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else None
        rows = first.shape[0] if isinstance(first, torch.Tensor) and first.dim() else None
        for loader in self._loaders.values():
            if loader.current and len(loader.current) == rows:
                return {"loader": loader.number, "epoch": loader.epochs, "indices": loader.current}
        return {}
