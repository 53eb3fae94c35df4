"""Convert any tensor that a hook may see to a plain strided one: also under vmap, sparse, quantised or sharded ones."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tensortap.adapters.torch.distributed.shards import local_of
from tensortap.reduce.buffers import buffer_of_plain
from tensortap.reduce.torch_values import strided_values
from tensortap.types import DTYPES, Buffer

CODES: Final = {getattr(torch, d.name): d.code for d in DTYPES if hasattr(torch, d.name)}
_FAKE: Final = frozenset(("FakeTensor", "FunctionalTensor", "ProxyTensor"))


def values_of(tensor: Tensor) -> Tensor | None:
    """Return a strided tensor of a dtype the kernels read, on its device; None when the tensor has no values."""
    if tensor.is_meta or type(tensor).__name__ in _FAKE:
        return None
    inside = _unwrapped(tensor.detach())
    with torch.no_grad(), torch._C._DisableFuncTorch():
        plain: Tensor = strided_values(local_of(inside))
        return plain


def host_buffer(tensor: Tensor) -> Buffer | None:
    """Return the host memory of any tensor that has values. It waits for a device."""
    plain = values_of(tensor)
    return None if plain is None else buffer_of_plain(plain.cpu())


def _unwrapped(tensor: Any) -> Any:
    """Return the tensor inside the wrappers of vmap and functional transforms, with the batch that vmap hides."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
