"""Record an optimizer's updates: parameters are copied before its step and subtracted after it.

Small dense parameters are copied, subtracted and recorded by one call of the kernel each time, others by PyTorch. Each
row has the number `ratio`: the size of the change relative to the parameter's as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tensortap.adapters.torch.autograd.members import MemberPort
from tensortap.adapters.torch.distributed.shards import local_of
from tensortap.adapters.torch.modules.tensors import PLAIN, TensorObserver, entry_for
from tensortap.adapters.torch.modules.values import values_of
from tensortap.record.recorder import OpenStep
from tensortap.record.table import Value
from tensortap.reduce import kernel as kernels
from tensortap.reduce.buffers import NUMPY_DTYPES

_OFFSET, _SUBTRACTED = 0, 3  # of a copy; see `kernels.copy_tensors`
_KEY, _ROW = 0, 3  # of an entry; see `kernels.record_many`
_LEFT_TO_PYTORCH: Final = -1
_RATIO: Final = "ratio"
_SPARE_BYTES: Final = 256 << 20  # of copies whose memory is kept for the next step: page faults cost as much as copying


class CopiedParameters(NamedTuple):
    """Parameters that an optimizer is about to change, with copies: in a buffer, or as clones by position."""

    members: list[MemberPort]
    parameters: tuple[nn.Parameter, ...]
    copies: npt.NDArray[np.int64]
    buffer: npt.NDArray[np.uint8]
    clones: dict[int, Tensor]

    def old(self, i: int) -> Tensor:
        """Return a parameter as it was."""
        clone = self.clones.get(i)
        return self._in_buffer(i) if clone is None else clone

    def change(self, i: int, in_place: bool = False) -> Tensor:
        """Return the change of a parameter; with `in_place` the result overwrites the copy of the old parameter."""
        if self.copies[i, _SUBTRACTED] > 0:
            return self._in_buffer(i)
        old = self.old(i)
        return torch.sub(self.parameters[i], old, out=old) if in_place else self.parameters[i] - old

    def _in_buffer(self, i: int) -> Tensor:
        offset, numel, code, _ = self.copies[i].tolist()
        dtype = NUMPY_DTYPES[code]
        elements = self.buffer[offset : offset + numel * dtype.itemsize].view(dtype)
        return torch.from_numpy(elements).reshape(self.parameters[i].shape)


class UpdateRecorder:
    """Record the changes that an optimizer's step makes to parameters."""

    def __init__(self, observer: TensorObserver) -> None:
        self._observer = observer
        self._copied: list[CopiedParameters] = []  # one for each optimizer that is stepping
        self._buffer = np.empty(0, np.uint8)
        self._spare: dict[str, Tensor] = {}  # clones of the last step, whose memory is used again, by site
        self._spare_bytes = 0

    def clear(self) -> None:
        """Drop the copies."""
        self._copied.clear()
        self._buffer = np.empty(0, np.uint8)
        self._spare, self._spare_bytes = {}, 0

    def copy(self, found: Iterable[tuple[MemberPort, nn.Parameter]]) -> None:
        """Copy parameters before an optimizer's step."""
        members, parameters = [], []
        for member, parameter in found:
            members.append(member)
            parameters.append(parameter)
        if members:
            self._drop_older(members)
            self._copied.append(self._copy(members, tuple(parameters)))

    def _drop_older(self, members: list[MemberPort]) -> None:
        """Drop copies of the same parameters that a failed step left behind."""
        if self._copied:
            paths = {member.port.path for member in members}
            self._copied = [c for c in self._copied if not paths.issuperset(m.port.path for m in c.members)]

    def _copy(self, members: list[MemberPort], parameters: tuple[nn.Parameter, ...]) -> CopiedParameters:
        copies = np.full((len(members), 4), _LEFT_TO_PYTORCH, np.int64)
        # One buffer is used again in every step, but not while another optimizer's copies lie in it.
        buffer = np.empty(0, np.uint8) if self._copied else self._buffer
        if kernels.copy_tensors is not None and self._observer.records_many:
            given = tuple([parameter if type(parameter) in PLAIN else None for parameter in parameters])
            size = kernels.copy_tensors(kernels.address(copies), buffer.ctypes.data, len(buffer), given)
            if size > len(buffer):
                buffer = np.empty(size, np.uint8)
                kernels.copy_tensors(kernels.address(copies), buffer.ctypes.data, size, given)
            if not self._copied:
                self._buffer = buffer
        with torch.no_grad():
            left = np.flatnonzero(copies[:, _OFFSET] == _LEFT_TO_PYTORCH).tolist()
            clones = {i: self._clone(members[i].site, parameters[i]) for i in left}
        return CopiedParameters(members, parameters, copies, buffer, clones)

    def _clone(self, site: str, parameter: nn.Parameter) -> Tensor:
        spare = self._spare.pop(site, None)
        if spare is None:
            return parameter.clone()
        self._spare_bytes -= spare.nbytes
        fits = self._is_on_host(parameter) and (spare.shape, spare.dtype) == (parameter.shape, parameter.dtype)
        return spare.copy_(parameter) if fits and spare.stride() == parameter.stride() else parameter.clone()

    def _is_on_host(self, parameter: Tensor) -> bool:
        """Return whether a parameter is an ordinary one that is reduced at once; devices read it later."""
        return type(parameter) in PLAIN and not self._observer.devices.wants(parameter)

    def _keep_memory(self, copied: CopiedParameters) -> None:
        """Keep the memory of clones for the next step, up to a limit. A device's allocator does that itself."""
        for i, clone in copied.clones.items():
            if self._is_on_host(copied.parameters[i]) and self._spare_bytes + clone.nbytes <= _SPARE_BYTES:
                self._spare[copied.members[i].site] = clone
                self._spare_bytes += clone.nbytes

    def record(self, step: OpenStep) -> None:
        """Record the changes after an optimizer's step."""
        copied, self._copied = self._copied, []
        recorded: set[str] = set()
        with torch.no_grad():
            for parameters in reversed(copied):  # of a parameter that was copied twice the last copy counts
                self._record(step, parameters, recorded)
                self._keep_memory(parameters)
                recorded.update(member.port.path for member in parameters.members)

    def _record(self, step: OpenStep, copied: CopiedParameters, recorded: set[str]) -> None:
        members, parameters, copies, buffer, _ = copied
        found = zip(members, parameters, strict=True)
        entries = np.array([entry_for(m.port.point(""), parameter, step) for m, parameter in found], np.int64)
        if recorded:
            entries[[i for i, member in enumerate(members) if member.port.path in recorded], _KEY] = -1
        norms, i = np.empty(len(members)), 0
        while (i := step.table.record_changes(entries, copies, buffer, norms, parameters, i)) < len(members):
            if members[i].port.path not in recorded:
                entries[i, _ROW] = self._record_one(step, copied, i, norms)
            i += 1
        self._add_ratios(step, members, entries[:, _ROW], norms)

    def _record_one(self, step: OpenStep, copied: CopiedParameters, i: int, norms: npt.NDArray[Any]) -> int:
        """Record a change that the kernel leaves to PyTorch. Return its row, or −1 where its ratio is there already."""
        observer, port = self._observer, copied.members[i].port
        try:
            point = port.point("")
            if not copied.copies[i, _SUBTRACTED] > 0 and self._is_on_host(copied.parameters[i]):
                norms[i] = _norm(copied.old(i))
                # The tensors that user functions receive must not change afterwards.
                change = copied.change(i, in_place=not step.armed & point.keeping)
                return observer.take(point, change, step)
            change = copied.change(i)
            row = observer.take(point, change, step)
            if row >= 0 and observer.devices.wants(change):
                observer.devices.number(step, row, _RATIO, ratio(change, copied.old(i)), port.bits)
                return -1
            if not copied.copies[i, _SUBTRACTED] > 0:
                norms[i] = _norm(copied.old(i))
            return row
        except Exception as error:
            observer.recorder.counters.failed("skipped_tensors", f"recording {copied.members[i].site}", error)
            return -1

    def _add_ratios(
        self, step: OpenStep, members: list[MemberPort], rows: npt.NDArray[Any], norms: npt.NDArray[Any]
    ) -> None:
        sizes = step.table.columns["l2"][rows].tolist()
        step.table.values += [
            Value(row, _RATIO, size / norm if norm else math.inf, member.port.bits)
            for member, row, size, norm in zip(members, rows.tolist(), sizes, norms.tolist(), strict=True)
            if row >= 0
        ]


def _norm(tensor: Tensor) -> float:
    norm = kernels.norms((tensor,))[0] if kernels.norms is not None and type(tensor) is Tensor else None
    # C does not handle some, such as single elements; PyTorch does.
    return float(torch.linalg.vector_norm(local_of(tensor))) if norm is None else norm


def ratio(change: Tensor, old: Tensor) -> Tensor:
    """Return ‖change‖ / ‖old‖ of this process's shard, on its device; halves would overflow and are widened."""
    plain = [values for values in (values_of(change), values_of(old)) if values is not None]
    wide = [values.float() if values.element_size() < 4 else values for values in plain]
    size, norm = (torch.linalg.vector_norm(values) for values in wide)
    return torch.where(norm > 0, size / norm, float("inf"))
