"""A metric given as a tensor: read at once where it lies on the host, sent on its way where it is on a device."""

from __future__ import annotations

import os

from torch import Tensor

from tensortap.adapters.torch.device.devices import VARIABLE
from tensortap.adapters.torch.device.keep import copy_to_host
from tensortap.adapters.torch.device.streams import HostStream, quietly, stream_of
from tensortap.record.pending import PendingNumber


def number(tensor: Tensor, stream: HostStream | None = None) -> float | PendingNumber:
    """The one number in a tensor, now or later."""
    if tensor.numel() != 1:
        raise ValueError(f"it has {tensor.numel()} elements")
    if tensor.is_cpu and not os.environ.get(VARIABLE):
        return float(tensor.detach())
    stream = stream or stream_of(tensor.device)
    with quietly(stream):
        return PendingNumber(copy_to_host(tensor.detach().reshape(()), stream), stream.mark())
