"""The reduction in PyTorch's own operations, for devices without Triton: the same row, and nothing that waits.

Elements are taken in pieces, so that temporary memory stays bounded, in float64 (float32 where the device has none:
then moments are good to about six digits, and everything else stays exact). Pieces merge by Chan's formula for many
parts at once. No operation here needs to know a value on the host.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tensortap.reduce.graph_kernel import MOMENTS, merge_in_graph, reduce_in_graph

# The words of a row as it leaves the device: four counts, the moments, the power of two that they are scaled by, the
# linear hash where it is wanted, and room; behind them, where a histogram is wanted, a count of 32 bits for every
# bucket, and one bin.
WORDS: Final = 16
POWER: Final = 4 + len(MOMENTS)
HASH: Final = POWER + 1
COUNTS: Final = WORDS
COUNT_WORDS: Final = 2048
_BIN: Final = 2 * COUNT_WORDS - 1  # elements without a bucket: zeros, and values that are not finite
_PIECE: Final = 1 << 20
_INFINITY: Final = float("inf")


def floats_on(device: torch.device) -> torch.dtype:
    """Return the widest floats that a device computes with."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not getattr(torch.xpu.get_device_properties(device), "has_fp64", True):
        return torch.float32
    return torch.float64


def reduce(flat: Tensor, words: Tensor, histogram: bool) -> None:
    """Compute the row of a dense run of elements into its words; counts are added to those behind them."""
    floats = floats_on(flat.device)
    flat = as_real(flat)
    power, scale = scale_of(flat) if flat.dtype is torch.float64 else (None, None)
    pieces = [_piece(part, floats, scale) for part in torch.split(flat, _PIECE)]
    numbers, moments = _merged(*(torch.stack(kind) for kind in zip(*pieces, strict=True)))
    words[:4].copy_(numbers)
    held = words[4:POWER].view(floats)
    (held if floats is torch.float64 else held[::2]).copy_(moments)
    write_power(words, power)
    if histogram:
        for part in torch.split(flat, _PIECE):
            _count(part, words[COUNTS : COUNTS + COUNT_WORDS].view(torch.int32))


def as_real(flat: Tensor) -> Tensor:
    """Return the magnitudes of complex elements, computed as in `numpy_kernel`; other elements as they are."""
    if not flat.is_complex():
        return flat
    floats = floats_on(flat.device)
    re, im = torch.view_as_real(flat).to(floats).abs().unbind(-1)
    most = torch.maximum(re, im)
    large, small = (500, -400) if floats is torch.float64 else (60, -50)
    unit = _either(most > 2.0**large, most < 2.0**small, 1.2 * large, most)
    a, b = re * unit, im * unit
    size = torch.sqrt(a * a + b * b) / unit
    return torch.where(torch.isinf(re) | torch.isinf(im), _INFINITY, size)


def _either(large: Tensor, small: Tensor, power: float, like: Tensor) -> Tensor:
    """Return two to minus `power` where large, to plus `power` where small, else one: factors that round nothing."""
    return torch.ones_like(like).masked_fill(large, 2.0**-power).masked_fill(small, 2.0**power)


def scale_of(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return a power by which to scale doubles whose fourth powers may overflow or vanish, and two to that power."""
    size = torch.where(torch.isfinite(flat), flat.abs(), 0.0).amax()
    extreme = (size > 2.0**200) | ((size > 0) & (size < 2.0**-180))
    power = torch.where(extreme, -torch.frexp(size).exponent.clamp(-1000, 1000), 0)
    return power, torch.ldexp(torch.ones_like(size), power)


def write_power(words: Tensor, power: Tensor | None) -> None:
    """Note the power of two that a row's moments are scaled by; the words were zero before."""
    if power is not None:
        words[POWER].copy_(power)


class _TorchGraphOperations:
    """PyTorch's operations, for the shared graph kernel."""

    isnan = staticmethod(torch.isnan)
    isfinite = staticmethod(torch.isfinite)
    where: Any = staticmethod(torch.where)
    count = staticmethod(torch.sum)
    sum = staticmethod(torch.sum)
    min = staticmethod(torch.amin)
    sqrt = staticmethod(torch.sqrt)
    max = staticmethod(torch.amax)

    def is_zero(self, x: Tensor) -> Tensor:
        return x == 0

    def as_float(self, count: Tensor, like: Tensor) -> Tensor:
        return count.to(like.dtype)

    def maximum(self, x: Tensor, least: float) -> Tensor:
        return x.clamp(min=least)


_OPERATIONS: Final = _TorchGraphOperations()


def _piece(part: Tensor, floats: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the counts and the moments of one piece."""
    values = reduce_in_graph(_OPERATIONS, part.to(floats), None if scale is None else lambda *_: scale)
    return torch.stack(values.counts), torch.stack(values.moments)


def _merged(counts: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the counts and the moments of all pieces together."""
    n = counts.unbind(1)[4].to(moments.dtype)
    return counts.narrow(1, 0, 4).sum(0), torch.stack(merge_in_graph(_OPERATIONS, n, moments.unbind(1)))


def _count(part: Tensor, counts: Tensor) -> None:
    """Add the elements to their buckets. Integers are added, so the order does not matter."""
    wide = part.dtype.itemsize > 2 and part.dtype is not torch.float32 and floats_on(part.device) is torch.float64
    v = part.to(torch.float64 if wide else torch.float32)
    bits = _cut(v) if wide else v.view(torch.int32)
    bucket = ((bits >> 19) & 0xFFE) | ((bits >> 31) & 1)
    bucket = torch.where(torch.isfinite(v) & (v != 0), bucket, _BIN)
    counts.scatter_add_(0, bucket.long(), torch.ones_like(bucket, dtype=torch.int32))


def _cut(v: Tensor) -> Tensor:
    """Return the bits of doubles cut (never rounded) to floats, as `numpy_kernel` does."""
    bits: Any = v.view(torch.int64)
    size = bits & 0x7FFF_FFFF_FFFF_FFFF
    exponent = size >> 52
    mantissa = (size & 0xF_FFFF_FFFF_FFFF) | (1 << 52)
    small = (mantissa >> (29 + 897 - exponent).clamp(0, 63)).clamp(min=1)
    cut = torch.where(exponent >= 897, (size >> 29) - (896 << 23), small)
    cut = torch.where(exponent >= 1023 + 128, 0x7F7F_FFFF, cut)
    signed: Tensor = cut | (((bits >> 63) & 1) << 31)
    return signed
