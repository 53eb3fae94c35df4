"""Ask torch.distributed for the rank, and for a sum over all ranks."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from tensortap.distributed.ranks import World

AVAILABLE: Final = distributed.is_available()  # whether PyTorch was built with it


def has_group() -> bool:
    """Return whether there is a process group."""
    return AVAILABLE and distributed.GroupMember.WORLD is not None


def world() -> World | None:
    """Return this rank and the number of ranks, once there is a process group."""
    if not has_group():
        return None
    return World(distributed.get_rank(), distributed.get_world_size())


def summed(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the sum over all ranks: one all-reduce on the default group, which every rank must take part in."""
    tensor = torch.from_numpy(numbers).to(_device())
    distributed.all_reduce(tensor)
    result: npt.NDArray[np.float64] = tensor.cpu().numpy()
    return result


def _device() -> Any:
    group = distributed.distributed_c10d._get_default_group()
    devices = {device.type for device in group._device_types}
    return torch.device("cpu") if "cpu" in devices or not devices else torch.accelerator.current_accelerator()
