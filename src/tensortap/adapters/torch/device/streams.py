"""Where a device's work is queued, and how its numbers reach the host without anybody waiting for them.

What differs between CUDA, ROCm, XPU, MPS and the CPU is here: the current stream, memory that a device can copy to by
itself, and the event that tells when it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class HostStream:
    """The CPU, whose work is done when the call returns. It stands for a device in tests."""

    key: Hashable = "cpu"
    capturing = False

    def here(self) -> AbstractContextManager[Any]:
        """While this lasts, work is queued here."""
        return contextlib.nullcontext()

    def host_memory(self, like: Tensor) -> Tensor:
        """Memory on the host, of a tensor's type and shape, that this device can copy to."""
        return torch.empty(like.shape, dtype=like.dtype)

    def mark(self) -> Callable[[], None]:
        """A function that waits for everything queued here so far."""
        return _nothing


class DeviceStream(HostStream):
    """The current stream of a device; devices without streams have one queue."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = getattr(torch, device.type)
        current = getattr(self._module, "current_stream", None)
        self._stream = None if current is None else current(device)
        self._waiting = {"blocking": True} if device.type == "cuda" else {}  # asleep, instead of busy, while it waits
        self.key = (device, getattr(self._stream, "stream_id", 0))
        self.capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def here(self) -> AbstractContextManager[Any]:
        """Its device and stream are the current ones."""
        return contextlib.nullcontext() if self._stream is None else self._module.stream(self._stream)

    def host_memory(self, like: Tensor) -> Tensor:
        """Pinned memory, from PyTorch's cache of it: it is not used again before a copy that is under way has ended."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._stream is not None)

    def mark(self) -> Callable[[], None]:
        """An event, recorded now."""
        event = self._module.Event(**self._waiting)
        event.record(*(() if self._stream is None else (self._stream,)))
        wait: Callable[[], None] = event.synchronize
        return wait


def stream_of(device: torch.device) -> HostStream:
    """Where work on a device is queued now."""
    return HostStream() if device.type == "cpu" else DeviceStream(device)


@contextlib.contextmanager
def quietly(stream: HostStream) -> Iterator[None]:
    """Work of ours goes to the stream, and no mode of the user's reaches into it."""
    with torch.inference_mode(False), torch.no_grad(), stream.here():
        yield


def _nothing() -> None:
    return None
