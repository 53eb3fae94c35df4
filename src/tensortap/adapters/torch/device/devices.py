"""Reduce tensors on their device, into the step's buffer. Nothing here waits for the device.

The row is reserved in the step's table at once; its values come with the buffer, which is copied to the host when the
step closes. The Triton kernel reduces on CUDA and ROCm, PyTorch's own operations elsewhere.
`TENSORTAP_DEVICE_PATH=torch` (or `triton`, with its interpreter) sends CPU tensors this way too, for tests.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tensortap.adapters.torch.device import operations as device_ops
from tensortap.adapters.torch.device.batch import FIRST_WORDS, Batch
from tensortap.adapters.torch.device.hashing import linear_hash_on_device
from tensortap.adapters.torch.device.keep import copies_of, copy_to_host, pick
from tensortap.adapters.torch.device.streams import HostStream, on_stream, stream_of
from tensortap.adapters.torch.distributed.shards import tensor_for_function
from tensortap.adapters.torch.modules.values import CODES
from tensortap.record.pending import HostCopy
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.record.table import StepTable, Value
from tensortap.reduce import numpy_memory
from tensortap.reduce.reducers import Keeper
from tensortap.reduce.statistics import empty_row, row_without_values

Reduce = Callable[[Tensor, Tensor, bool], None]
VARIABLE: Final = "TENSORTAP_DEVICE_PATH"
_MOST_COUNTED: Final = 1 << 32


class DeviceReducer:
    """Reduce tensors on their device. There is one for each tap."""

    def __init__(self, recorder: Recorder, streams: Callable[[torch.device], HostStream] = stream_of) -> None:
        self.forced = os.environ.get(VARIABLE, "")
        self._recorder = recorder
        self._streams = streams
        self._reducers: dict[str, Reduce] = {}
        self._words: dict[Hashable, int] = {}

    def wants(self, tensor: Tensor) -> bool:
        """Return whether a tensor is to be reduced on its device."""
        return bool(self.forced) or not tensor.is_cpu

    def take(self, point: Point, plain: Tensor, tensor: Tensor, step: OpenStep, armed: int, recomputed: bool) -> int:
        """Queue a tensor's reduction. Return its row, −1 when the step is closed, −2 while a CUDA graph is captured."""
        begin, stream = time.perf_counter_ns(), self._streams(plain.device)
        if stream.capturing:
            return -2
        while True:
            batch = self._batch(step.table, stream, plain.device)
            with batch.lock:
                if not batch.sent:
                    row = self._queue(batch, point, plain, step, armed, recomputed)
                    if row >= 0:
                        self._keep(batch.stream, point, plain, tensor, step.table, row, armed)
                        step.table.columns["cost"][row] = time.perf_counter_ns() - begin
                    return row

    def number(self, step: OpenStep, row: int, name: str, number: Tensor, probes: int) -> None:
        """Add a number to a row; one that a device computes is pending, as the row is."""
        if not self.wants(number):
            step.table.values.append(Value(row, name, float(number), probes))
            return
        stream = self._streams(number.device)
        self._batch(step.table, stream, number.device)  # even where it has no rows, its event tells when this arrived
        with on_stream(stream):
            step.table.values.append(Value(row, name, HostCopy(copy_to_host(number, stream)), probes))

    def _batch(self, table: StepTable, stream: HostStream, device: torch.device) -> Batch:
        for rows in table.pending:
            if isinstance(rows, Batch) and not rows.sent and rows.stream.key == stream.key:
                return rows
        batch = Batch(stream, device, self._words.get(stream.key, FIRST_WORDS))
        table.pending.append(batch)
        return batch

    def _queue(self, batch: Batch, point: Point, plain: Tensor, step: OpenStep, armed: int, recomputed: bool) -> int:
        table, numel, histogram = step.table, plain.numel(), bool(armed & step.hist)
        hashed = bool(armed & self._recorder.hash_probes)
        place = (point.key, armed, recomputed, CODES[plain.dtype], tuple(plain.shape))
        if not numel:
            row = table.insert(*place, empty_row(hashed), 0, np.zeros(0, np.uint32) if histogram else None)
            if row < 0:
                self._recorder.counters.add("late_records")
            return row
        with on_stream(batch.stream):
            flat = _flat(plain)
            row = table.insert(*place, row_without_values(numel))
            if row < 0:
                self._recorder.counters.add("late_records")
                return row
            nbytes = numel * plain.element_size() if hashed else None
            words = batch.reserve(row, numel, histogram and numel < _MOST_COUNTED, nbytes)
            self._words[batch.stream.key] = max(self._words.get(batch.stream.key, FIRST_WORDS), batch.words)
            try:
                self._reduce(flat, words)
                if hashed:
                    words[device_ops.HASH].copy_(linear_hash_on_device(plain))
            except Exception:
                batch.forget_last()
                raise
        return row

    def _reduce(self, flat: Tensor, words: Tensor) -> None:
        histogram, kind = len(words) > device_ops.WORDS, flat.device.type
        reduce = self._reducers.get(kind) or self._choose(kind)
        try:
            reduce(flat, words, histogram)
        except Exception as error:
            if reduce is device_ops.reduce or self.forced:
                raise
            # Triton compiles when it is first used, for which it needs a C compiler and a driver that it knows.
            self._recorder.counters.note("device_errors", "the Triton kernel (PyTorch's operations take over)", error)
            self._reducers[kind] = device_ops.reduce
            device_ops.reduce(flat, words.zero_(), histogram)

    def _choose(self, kind: str) -> Reduce:
        reduce: Reduce = device_ops.reduce
        if (self.forced or {"cuda": "triton"}.get(kind)) == "triton":
            try:
                reduce = importlib.import_module("tensortap.adapters.torch.device.triton_kernel").reduce
            except ImportError:  # absent, or not for this platform: the same row, by more launches
                self._recorder.counters.add("without_triton")
        self._reducers[kind] = reduce
        return reduce

    def _keep(
        self, stream: HostStream, point: Point, plain: Tensor, tensor: Tensor, table: StepTable, row: int, armed: int
    ) -> None:
        if not armed & point.keeping:
            return

        def picked(keeper: Keeper) -> npt.NDArray[Any] | None:
            with on_stream(stream):
                return pick(keeper, plain, point.text, stream)

        def asked(function: Callable[[Any], Any]) -> Any:
            result = function(tensor_for_function(tensor))
            with on_stream(stream):
                return copies_of(result, stream)

        self._recorder.elements.keep_by(table, row, point, armed, picked, asked)


def _flat(plain: Tensor) -> Tensor:
    """Return the elements as one dense run: a view where memory has no gaps, otherwise a copy."""
    size = plain.element_size()
    if not plain.untyped_storage().nbytes():  # a kernel that reads it would take the whole process with it
        raise ValueError("its memory was freed, as sharding does between uses")
    if plain.is_contiguous():
        return plain.view(-1)
    strides = tuple(stride * size for stride in plain.stride())
    _, runs = numpy_memory.plan(0, CODES[plain.dtype], tuple(plain.shape), strides)
    if runs == [(plain.numel(), size)]:
        return plain.as_strided((plain.numel(),), (1,))
    return plain.contiguous().view(-1)
