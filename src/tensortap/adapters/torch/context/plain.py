"""Which tensors the context reads."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import Tensor, nn


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    """Return whether values can be read at once: on a device that would wait, and for a shard it would need other
    ranks.
    """
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
