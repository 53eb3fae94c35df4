"""A tensor's memory, as fast as it can be had from Python; odd tensors the slow way."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tensortap.adapters.torch.parts import Parts, is_dtensor, local_of
from tensortap.recorder import OpenStep, Point, Recorder
from tensortap.types import DTYPES, Buffer

CODES: Final = {getattr(torch, d.name): d.code for d in DTYPES if hasattr(torch, d.name)}
_NO_VALUES: Final = (0, 0, 0, 0, *(float("nan"),) * 6)
_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))
_FAKE: Final = frozenset(("FakeTensor", "FunctionalTensor", "ProxyTensor"))


class Taker:
    """Records tensors. `take` is what every hook ends in."""

    __slots__ = ("leaves", "parts", "recorder")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.leaves: list[Any] = []  # hooks on leaf tensors, to be taken off when the step closes
        self.parts: Parts | None = None  # where there are several ranks: which part of a tensor this one holds

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Reduce a tensor into the step's table; the row, or −1. What goes wrong is counted and goes no further."""
        armed = step.armed & point.probes
        if not armed:
            return -1
        if self.parts is not None and point.key not in self.parts.known:
            self._look(point, tensor)
        try:
            if type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous() and not armed & point.keeping:
                shape, table, want = tensor.shape, step.table, armed & step.hist != 0
                # Lazy negation comes with views of complex numbers, of which only single elements are contiguous.
                if (shape and shape[-1] != 1) or not tensor.is_neg():
                    code, address = CODES[tensor.dtype], tensor.data_ptr()
                    row = table._append(point.key, armed, want, recomputed, code, address, shape, None)
                    if row >= 0:
                        return row
                    return table.record(point.key, armed, want, recomputed, code, address, shape, None)
        except Exception:
            pass  # it has no plain memory after all: sparse, quantised, nested, wrapped by vmap
        return self._take_any(point, tensor, step, armed, recomputed)

    def _take_any(self, point: Point, tensor: Tensor, step: OpenStep, armed: int, recomputed: bool) -> int:
        try:
            buffer = readable(tensor)
            if buffer is None:
                return self._without_values(point, tensor, step, armed, recomputed)
            row = step.table.record(
                point.key, armed, armed & step.hist != 0, recomputed,
                buffer.dtype, buffer.address, buffer.shape, buffer.strides,
            )  # fmt: skip
            if row >= 0 and armed & point.keeping:
                self.recorder.keep(step.table, row, point, armed, buffer, _given(tensor))
            return row
        except Exception as error:
            self.recorder.ledger.failed("skipped_tensors", f"recording {point.text}", error)
            return -1

    def _look(self, point: Point, tensor: Tensor) -> None:
        try:
            assert self.parts is not None
            self.parts.look(point, tensor)
        except Exception as error:
            self.recorder.ledger.failed("skipped_parts", f"finding which part {point.text} holds", error)

    def _without_values(self, point: Point, tensor: Tensor, step: OpenStep, armed: int, recomputed: bool) -> int:
        """A tensor that has a shape but no values here: its metadata only."""
        self.recorder.ledger.add("tensors_without_values")
        row = (tensor.numel(), *_NO_VALUES)
        return step.table.insert(point.key, armed, recomputed, CODES[tensor.dtype], tuple(tensor.shape), row)


def readable(tensor: Tensor) -> Buffer | None:
    """The memory of any tensor that has some: local shards, quantised, sparse and nested values, other devices."""
    if tensor.is_meta or type(tensor).__name__ in _FAKE:
        return None
    inside = _unwrapped(tensor.detach())
    with torch.no_grad(), torch._C._DisableFuncTorch():
        plain = _plain(inside)
    strides = None if plain.is_contiguous() else tuple(stride * plain.element_size() for stride in plain.stride())
    return Buffer(plain.data_ptr(), CODES[plain.dtype], tuple(plain.shape), strides, plain)


def _given(tensor: Tensor) -> Any:
    """The tensor as a function of the user's gets it. Of a DTensor the local part: its mean() would be a collective."""
    return local_of(tensor).detach() if is_dtensor(tensor) else tensor.detach()


def _plain(tensor: Any) -> Tensor:
    tensor = local_of(tensor)  # free, where full_tensor() would be a collective
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
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_cpu else tensor.cpu()  # type: ignore[no-any-return]


def _unwrapped(tensor: Any) -> Any:
    """Under vmap and functional transforms: the tensor inside, with the batch that vmap hides."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
