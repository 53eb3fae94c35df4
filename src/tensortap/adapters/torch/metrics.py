"""Read a metric that is given as a tensor: at once on the host, without waiting on a device."""

from __future__ import annotations

import os

from torch import Tensor

from tensortap.adapters.torch.device.devices import VARIABLE
from tensortap.adapters.torch.device.keep import copy_to_host
from tensortap.adapters.torch.device.streams import HostStream, on_stream, stream_of
from tensortap.record.pending import PendingNumber


def number(tensor: Tensor, stream: HostStream | None = None) -> float | PendingNumber:
    """Return the one number in a tensor, or a pending number that is being copied from its device."""
    if tensor.numel() != 1:
        raise ValueError(f"it has {tensor.numel()} elements")
    if tensor.is_cpu and not os.environ.get(VARIABLE):
        return float(tensor.detach())
    stream = stream or stream_of(tensor.device)
    with on_stream(stream):
        return PendingNumber(copy_to_host(tensor.detach().reshape(()), stream), stream.record_event())
