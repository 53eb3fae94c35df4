"""Ask torch.distributed for the rank, and for a sum over all ranks."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from tensortap.distributed.ranks import SPAWNED, World
from tensortap.errors import UnsupportedError

AVAILABLE: Final = distributed.is_available()  # whether PyTorch was built with it


def has_group() -> bool:
    """Return whether there is a process group."""
    return AVAILABLE and distributed.GroupMember.WORLD is not None


def world() -> World | None:
    """Return this rank and the number of ranks, once there is a process group or in a spawned process."""
    if has_group():
        return World(distributed.get_rank(), distributed.get_world_size())
    index, count = spawned_index(), os.environ.get(SPAWNED, "")
    return World(index, int(count), independent=True) if index is not None and count.isdigit() else None


def spawned_index() -> int | None:
    """Return which process of `torch.multiprocessing.spawn` this is, as its function is told; None if it is none."""
    process: Any = multiprocessing.current_process()
    target, args = getattr(process, "_target", None), tuple(getattr(process, "_args", ()))
    started = getattr(target, "__module__", "") == "torch.multiprocessing.spawn"
    index: Any = args[1] if started and len(args) > 1 else None  # of (function, index, arguments, …)
    return index if isinstance(index, int) else None


def summed(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the sum over all ranks: one all-reduce on the default group, which every rank must take part in."""
    if not has_group():
        raise UnsupportedError(
            "global_stats=True of PyTorch needs a process group, got none: call torch.distributed.init_process_group() "
            "before tensortap.watch()"
        )
    tensor = torch.from_numpy(numbers).to(_device())
    distributed.all_reduce(tensor)
    result: npt.NDArray[np.float64] = tensor.cpu().numpy()
    return result


def _device() -> Any:
    group = distributed.distributed_c10d._get_default_group()
    devices = {device.type for device in group._device_types}
    return torch.device("cpu") if "cpu" in devices or not devices else torch.accelerator.current_accelerator()
