"""Keep elements of a tensor on a device: pick them there, copy them to the host without waiting."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tensortap.adapters.torch.device.operations import floats_on
from tensortap.adapters.torch.device.streams import HostStream, stream_of
from tensortap.adapters.torch.modules.values import CODES, host_buffer, values_of
from tensortap.record.pending import HostCopy
from tensortap.reduce.buffers import NUMPY_DTYPES, array_of
from tensortap.reduce.reducers import Full, Keeper, PerSample, Rows, Sample, Units, sample_indices

Array = npt.NDArray[Any]
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_to_host(tensor: Tensor, stream: HostStream) -> Array:
    """Queue a copy of a plain tensor to the host; return the array, valid once the queued work is done."""
    dense = tensor.contiguous()
    host = stream.host_memory(dense)
    host.copy_(dense, non_blocking=True)
    return _bits(host).numpy().view(NUMPY_DTYPES[CODES[host.dtype]])


def copies_of(result: Any, stream: HostStream) -> Any:
    """Queue copies of the tensors in what a user's function returned; leave everything else as it is."""
    if isinstance(result, Mapping):
        return {key: copies_of(value, stream) for key, value in result.items()}
    plain = values_of(result) if isinstance(result, Tensor) else None
    return result if plain is None else HostCopy(copy_to_host(plain, stream))


def pick(keeper: Keeper, tensor: Tensor, place: str, stream: HostStream) -> Array | None:
    """Pick the elements that `keeper.pick` would pick on the host; they are pending."""
    match keeper:
        case Full():
            found: Tensor | None = tensor
        case Sample():
            at = _positions(keeper.n, keeper.seed, place, tuple(tensor.shape), tensor.device)
            found = torch.take(_bits(tensor), at).view(tensor.dtype)
        case Rows():
            found = _rows(keeper, tensor)
        case Units():
            found = _units(tensor)
        case PerSample():
            found = _samples(keeper.axis, tensor)
        case _:  # a keeper without a device version: wait for the tensor
            buffer = host_buffer(tensor)
            return None if buffer is None else keeper.pick(array_of(buffer), place)
    return None if found is None else copy_to_host(found, stream)


def _bits(tensor: Tensor) -> Tensor:
    """Return small floats as integers, which every device can index."""
    bits = _BITS.get(tensor.element_size())
    return tensor if bits is None else tensor.view(bits)


@lru_cache(maxsize=1024)
def _positions(n: int, seed: int, place: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the positions that `sample` takes, copied to the device once for all steps."""
    indices = torch.from_numpy(np.array(sample_indices(n, seed, place, shape)))
    return stream_of(device).host_memory(indices).copy_(indices).to(device, non_blocking=True)


def _rows(keeper: Rows, tensor: Tensor) -> Tensor | None:
    there = keeper.there(tensor.shape)
    # A list as an index would become a tensor on the host, whose copy to the device is waited for.
    return torch.stack([_bits(tensor)[i] for i in there]).view(tensor.dtype) if there else None


def _units(tensor: Tensor) -> Tensor | None:
    if not tensor.ndim or not tensor.numel():
        return None
    axis = 1 if tensor.ndim in (4, 5) else tensor.ndim - 1
    if tensor.element_size() < 4 or not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.float32)
    by_unit = tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])
    size = by_unit.abs().sum(0, dtype=floats_on(tensor.device)) / len(by_unit)
    return torch.stack([(by_unit != 0).sum(0) / len(by_unit), size]).to(torch.float32)


def _samples(axis: int, tensor: Tensor) -> Tensor | None:
    if tensor.ndim <= axis or not tensor.numel():
        return None
    rows = tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1).abs().to(floats_on(tensor.device))
    finite = rows.isfinite()
    rows = torch.where(finite, rows, torch.zeros_like(rows))
    most = rows.amax(1)
    scale = torch.where(most > 0, most, torch.ones_like(most))
    rms = scale * ((rows / scale[:, None]).square().sum(1) / finite.sum(1).clamp(min=1)).sqrt()
    return torch.stack([(~finite).sum(1).to(rms.dtype), rms, most]).to(torch.float32)
