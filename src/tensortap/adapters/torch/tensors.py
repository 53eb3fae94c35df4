"""A tensor's memory, as fast as it can be had from Python; odd tensors the slow way."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tensortap.recorder import OpenStep, Point, Recorder
from tensortap.types import DTYPES, Buffer

CODES: Final = {getattr(torch, d.name): d.code for d in DTYPES if hasattr(torch, d.name)}
_UNKNOWN_VALUES: Final = (0, 0, 0, 0, *(float("nan"),) * 4, 0.0, 0.0)
_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))


class Taker:
    """Records tensors. `take` is what every hook ends in."""

    __slots__ = ("hist", "recorder")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.hist = recorder.histogram_probes

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Reduce a tensor into the step's table. Whatever goes wrong is counted and does not reach the model."""
        armed = step.armed & point.probes
        if not armed:
            return -1
        try:
            if type(tensor) in _PLAIN and tensor.is_cpu and not tensor.is_neg():
                buffer = _buffer(tensor)
            else:
                buffer = readable(tensor)
            if buffer is None:
                return self._without_values(point, tensor, step, armed, recomputed)
            row = step.table.record(
                point.key, armed, armed & self.hist != 0, recomputed,
                buffer[1], buffer[0], buffer[2], buffer[3],
            )  # fmt: skip
            if armed & point.keeping:
                self.recorder.keep(step.table, row, point, armed, Buffer(*buffer), tensor.detach())
            return row
        except Exception as error:
            self.recorder.ledger.failed("skipped_tensors", f"recording {point.text}", error)
            return -1

    def _without_values(self, point: Point, tensor: Tensor, step: OpenStep, armed: int, recomputed: bool) -> int:
        """A tensor that has a shape but no values here: its metadata only."""
        code = CODES.get(tensor.dtype)
        if code is None:
            self.recorder.ledger.add("skipped_tensors")
            return -1
        self.recorder.ledger.add("tensors_without_values")
        row = (tensor.numel(), *_UNKNOWN_VALUES)
        return step.table.insert(point.key, armed, recomputed, code, tuple(tensor.shape), row)


def _buffer(tensor: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...] | None, Tensor]:
    try:
        strides = None if tensor.is_contiguous() else _byte_strides(tensor)
        return tensor.data_ptr(), CODES[tensor.dtype], tensor.shape, strides, tensor
    except (KeyError, RuntimeError, NotImplementedError):
        found = readable(tensor)
        if found is None:
            raise
        return found


def _byte_strides(tensor: Tensor) -> tuple[int, ...]:
    size = tensor.element_size()
    return tuple(stride * size for stride in tensor.stride())


def readable(tensor: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...] | None, Tensor] | None:
    """The memory of any tensor that has some: local shards, quantised, sparse and nested values, other devices."""
    with torch.no_grad():
        plain = _plain(tensor.detach())
    if plain is None:
        return None
    strides = None if plain.is_contiguous() else _byte_strides(plain)
    return plain.data_ptr(), CODES[plain.dtype], tuple(plain.shape), strides, plain


def _plain(tensor: Any) -> Tensor | None:
    if tensor.device.type == "meta" or _is_fake(tensor):
        return None
    if hasattr(tensor, "to_local"):  # a DTensor's own part: free, where full_tensor() would be a collective
        tensor = tensor.to_local()
    tensor = _unbatched(tensor)
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        tensor = (
            tensor.values() if tensor.layout is torch.jagged else torch.cat([t.reshape(-1) for t in tensor.unbind()])
        )
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values() if hasattr(tensor, "values") and "sparse" in str(tensor.layout) else tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype not in CODES:
        tensor = tensor.to(torch.complex64 if tensor.dtype is torch.complex32 else torch.float32)
    return tensor if tensor.is_cpu else tensor.cpu()  # type: ignore[no-any-return]


def _is_fake(tensor: Any) -> bool:
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor", "ProxyTensor")


def _unbatched(tensor: Any) -> Any:
    """Under vmap: the tensor with the batch that vmap hides."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
