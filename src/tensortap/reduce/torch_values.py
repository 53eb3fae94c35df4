"""Read a PyTorch tensor's values as a plain tensor, by its own methods: nothing imports PyTorch here.

Quantised tensors give the numbers that they stand for; sparse and nested ones the values that they store, without
the zeros and gaps between them; distributed ones this process's part.
"""

from __future__ import annotations

import sys
from typing import Any

from tensortap.types import DTYPE_CODE


def strided_values(tensor: Any) -> Any:
    """Return a strided tensor of a type that the kernels read, on the device where the values lie."""
    if hasattr(tensor, "to_local"):  # a DTensor's own part: free, where full_tensor() would be a collective
        tensor = tensor.to_local()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        tensor = _stored(tensor)
    if dtype_name(tensor) not in DTYPE_CODE:
        tensor = tensor.cfloat() if tensor.is_complex() else tensor.float()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def dtype_name(tensor: Any) -> str:
    """Return the name of its element type in `types.DTYPES`."""
    return str(tensor.dtype).removeprefix("torch.")


def _stored(tensor: Any) -> Any:
    layout = str(tensor.layout).removeprefix("torch.")
    if layout == "strided":  # nested, part after part
        return sys.modules["torch"].cat([part.reshape(-1) for part in tensor.unbind()])
    if layout == "sparse_coo":
        return tensor._values()  # as stored: `values()` wants duplicates added up, which would be another tensor
    return tensor.values() if layout == "jagged" or "sparse" in layout else tensor.to_dense()
