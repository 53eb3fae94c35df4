"""The values of any tensor as a plain one: local shards, quantised, sparse and nested values, lazy conjugates."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tensortap.types import DTYPES, Buffer

CODES: Final = {getattr(torch, d.name): d.code for d in DTYPES if hasattr(torch, d.name)}
_FAKE: Final = frozenset(("FakeTensor", "FunctionalTensor", "ProxyTensor"))


def values_of(tensor: Tensor) -> Tensor | None:
    """A strided tensor of a type the kernels read, where the values lie now; None when there are no values."""
    if tensor.is_meta or type(tensor).__name__ in _FAKE:
        return None
    inside = _unwrapped(tensor.detach())
    with torch.no_grad(), torch._C._DisableFuncTorch():
        return _plain(inside)


def readable(tensor: Tensor) -> Buffer | None:
    """The memory of any tensor that has values. It waits for a device."""
    plain = values_of(tensor)
    return None if plain is None else buffer_of_plain(plain.cpu())


def buffer_of_plain(plain: Tensor) -> Buffer:
    """The memory of a strided tensor on the host."""
    strides = None if plain.is_contiguous() else tuple(stride * plain.element_size() for stride in plain.stride())
    return Buffer(plain.data_ptr(), CODES[plain.dtype], tuple(plain.shape), strides, plain)


def _plain(tensor: Any) -> Tensor:
    if hasattr(tensor, "to_local"):  # a DTensor's own part: free, where full_tensor() would be a collective
        tensor = tensor.to_local()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        jagged = tensor.layout is torch.jagged
        tensor = tensor.values() if jagged else torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values() if "sparse" in str(tensor.layout) else tensor.to_dense()
    if tensor.dtype not in CODES:
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    return tensor.resolve_conj().resolve_neg()  # type: ignore[no-any-return]


def _unwrapped(tensor: Any) -> Any:
    """Under vmap and functional transforms: the tensor inside, with the batch that vmap hides."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
