"""Streams: where a device's work is queued, and how its numbers reach the host without waiting.

All that differs between CUDA, ROCm, XPU, MPS and the CPU is here: the current stream, pinned memory, and events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class HostStream:
    """The CPU, whose work is done when the call returns. Tests use it instead of a device."""

    key: Hashable = "cpu"
    capturing = False

    def as_current(self) -> AbstractContextManager[Any]:
        """Return a context in which work is queued here."""
        return contextlib.nullcontext()

    def host_memory(self, like: Tensor) -> Tensor:
        """Return host memory of a tensor's dtype and shape that this device can copy to."""
        return torch.empty(like.shape, dtype=like.dtype)

    def record_event(self) -> Callable[[], None]:
        """Return a function that waits for everything queued here so far."""
        return _nothing


class DeviceStream(HostStream):
    """The current stream of a device, or the one queue of a device without streams."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = getattr(torch, device.type)
        current = getattr(self._module, "current_stream", None)
        self._stream = None if current is None else current(device)
        self._waiting = {"blocking": True} if device.type == "cuda" else {}  # asleep, instead of busy, while it waits
        self.key = (device, getattr(self._stream, "stream_id", 0))
        self.capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def as_current(self) -> AbstractContextManager[Any]:
        """Return a context in which its device and stream are current."""
        return contextlib.nullcontext() if self._stream is None else self._module.stream(self._stream)

    def host_memory(self, like: Tensor) -> Tensor:
        """Return pinned memory from PyTorch's cache, which does not reuse it before a pending copy has ended."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._stream is not None)

    def record_event(self) -> Callable[[], None]:
        """Record an event now, and return its wait."""
        event = self._module.Event(**self._waiting)
        event.record(*(() if self._stream is None else (self._stream,)))
        wait: Callable[[], None] = event.synchronize
        return wait


def stream_of(device: torch.device) -> HostStream:
    """Return the stream on which work for a device is queued now."""
    return HostStream() if device.type == "cpu" else DeviceStream(device)


@contextlib.contextmanager
def on_stream(stream: HostStream) -> Iterator[None]:
    """Queue our work on the stream, out of reach of the user's autograd modes."""
    with torch.inference_mode(False), torch.no_grad(), stream.as_current():
        yield


def _nothing() -> None:
    return None
