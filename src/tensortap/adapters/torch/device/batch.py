"""The rows of one step that one stream reduces: a buffer on the device, one copy of it, and the layout of the copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tensortap.adapters.torch.device.operations import COUNT_WORDS, COUNTS, HASH, POWER, WORDS, floats_on
from tensortap.adapters.torch.device.streams import HostStream, on_stream
from tensortap.record.pending import CopiedRows
from tensortap.reduce.content_hash import ABSENT, finished
from tensortap.reduce.graph_kernel import row_from_graph
from tensortap.reduce.histogram import BUCKETS
from tensortap.reduce.numpy_kernel import trimmed
from tensortap.reduce.statistics import ROW

Array = npt.NDArray[Any]
FIRST_WORDS: Final = 64 * (WORDS + COUNT_WORDS)


class _ReservedRow(NamedTuple):
    """The place of a row in the buffers, and which values it has."""

    row: int
    buffer: int
    begin: int
    numel: int
    histogram: bool
    hashed: int | None  # the number of bytes that were hashed


class Batch:
    """Take rows until it is sent. `lock` is held while a row is reserved and its work is queued.

    The buffer comes from PyTorch's cache of device memory, so from the second step on nothing is allocated. It is made
    as large as the last step needed; a step that needs more adds buffers, each with a copy of its own.
    """

    def __init__(self, stream: HostStream, device: torch.device, words: int = FIRST_WORDS) -> None:
        self.lock = threading.RLock()
        self.stream = stream
        self.sent = False
        self._device = device
        self._words = words
        self._wide = floats_on(device) is torch.float64
        self._buffers: list[Tensor] = []
        self._used: list[int] = []
        self._reserved: list[_ReservedRow] = []
        self._hosts: list[Tensor] = []
        self._wait: Callable[[], None] = lambda: None

    @property
    def words(self) -> int:
        """How much of its buffers is used."""
        return sum(self._used)

    @property
    def nbytes(self) -> int:
        """The size in host memory, in bytes."""
        return 8 * self.words

    def reserve(self, row: int, numel: int, histogram: bool, hashed: int | None = None) -> Tensor:
        """Return the words, all zero, that a row's reduction is to fill."""
        size = WORDS + (COUNT_WORDS if histogram else 0)
        if not self._buffers or self._used[-1] + size > len(self._buffers[-1]):
            self._buffers.append(torch.zeros(max(self._words, size), dtype=torch.int64, device=self._device))
            self._used.append(0)
        begin = self._used[-1]
        self._used[-1] += size
        self._reserved.append(_ReservedRow(row, len(self._buffers) - 1, begin, numel, histogram, hashed))
        return self._buffers[-1][begin : begin + size]

    def forget_last(self) -> None:
        """Mark the last row as one without values: its work could not be queued."""
        self._reserved.pop()

    def start_copy(self) -> None:
        """Queue the copy to the host behind the work, and an event behind the copy."""
        with self.lock:
            if self.sent:
                return
            self.sent = True
            with on_stream(self.stream):
                for buffer, used in zip(self._buffers, self._used, strict=True):
                    host = self.stream.host_memory(buffer[:used])
                    host.copy_(buffer[:used], non_blocking=True)
                    self._hosts.append(host)
                self._wait = self.stream.record_event()
            self._buffers = []

    def subset(self, places: Mapping[int, int]) -> BatchRows:
        """Return the rows that another table takes over."""
        return BatchRows(self, places)

    def wait(self, places: Mapping[int, int] | None = None) -> CopiedRows:
        """Wait, and give every row its values; with `places`, the rows in it, by their new numbers."""
        self._wait()
        hosts = [host.numpy() for host in self._hosts]
        chosen = [reserved for reserved in self._reserved if places is None or reserved.row in places]
        rows = np.array([reserved.row if places is None else places[reserved.row] for reserved in chosen], np.intp)
        values, histograms = np.zeros(len(chosen), ROW), {}
        for i, reserved in enumerate(chosen):
            words = hosts[reserved.buffer][reserved.begin :]
            values[i] = self._row(words, reserved)
            if reserved.histogram:
                histograms[int(rows[i])] = trimmed(words[COUNTS : COUNTS + COUNT_WORDS].view(np.uint32)[:BUCKETS])
        return CopiedRows(rows, values, histograms)

    def _row(self, words: Array, reserved: _ReservedRow) -> tuple[float, ...]:
        floats = words[4:POWER].view(np.float64) if self._wide else words[4:POWER].view(np.float32)[::2]
        finite = reserved.numel - int(words[:3].sum())
        linear = int(words[HASH]) & (2**64 - 1)
        content = ABSENT if reserved.hashed is None else finished(linear, reserved.hashed)
        return row_from_graph((*words[:4], finite), floats, int(words[POWER]), content)


class BatchRows:
    """Some of a batch's rows, in a table of their own."""

    def __init__(self, batch: Batch, places: Mapping[int, int]) -> None:
        self._batch = batch
        self._places = places
        self.nbytes = batch.nbytes

    def start_copy(self) -> None:
        """Queue the copy of the batch, if that was not done yet."""
        self._batch.start_copy()

    def subset(self, places: Mapping[int, int]) -> BatchRows:
        """Return some of these."""
        return BatchRows(self._batch, {old: places[new] for old, new in self._places.items() if new in places})

    def wait(self) -> CopiedRows:
        """Wait for the batch."""
        return self._batch.wait(self._places)
