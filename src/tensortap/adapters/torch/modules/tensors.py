"""Read a tensor's memory into the step's table: plain CPU tensors by a short path, all others by a general one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from tensortap.adapters.torch.device.devices import VARIABLE, DeviceReducer
from tensortap.adapters.torch.distributed.shards import ShardRegistry, tensor_for_function
from tensortap.adapters.torch.modules.nested import GivenObjects
from tensortap.adapters.torch.modules.values import CODES, values_of
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.reduce import kernel as kernels
from tensortap.reduce.buffers import buffer_of_plain, view_of
from tensortap.reduce.statistics import row_without_values
from tensortap.types import Buffer

_CAPTURED: Final = (
    "a CUDA graph is being captured: what a replay computes cannot be seen, and tensors in it are recorded without "
    "values (counted as tensors_in_cuda_graphs)"
)
HOOK_VARIABLE: Final = "TENSORTAP_HOOK"
GRADIENTS, ARGUMENTS, OUTPUT = range(3)  # what a hook in C finds a tensor in: a node's gradients, a module's arguments
H = TypeVar("H", bound=kernels.NativeHook | kernels.ScopeHook)
_FLAG: Final = "_is_compiling_flag"  # what torch.compiler.is_compiling() tells, where C can read it
PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))
mode_is_on: Final = (
    torch._C._is_torch_function_mode_enabled
)  # a function mode would see the functions that an observer calls on a tensor


DisableTorchFunction: Final = torch._C.DisableTorchFunction
_NOT_ENTERED: Final = (
    "values hold objects of {}, in which tensors cannot be found (counted as objects_not_entered): name the tensors, "
    "tensortap.tap(x, 'name'), or register the class with torch.utils._pytree"
)


class TensorObserver:
    """Record tensors. Every hook ends in `take`."""

    __slots__ = ("_reader", "devices", "given_objects", "leaves", "reads_in_c", "recorder", "shards")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.devices = DeviceReducer(recorder)
        self.reads_in_c = _reads_in_c()
        self.leaves: list[Any] = []  # hooks on leaf tensors, to be taken off when the step closes
        self.given_objects = GivenObjects(self.not_entered, partial(recorder.counters.add, "objects_given_again"))
        self.shards: ShardRegistry | None = None  # where there are several ranks
        self._reader: kernels.Reader | None = None

    def reader(self, steps: object) -> kernels.Reader | None:
        """Return the object that hooks in C check before they read a tensor; None if every tensor goes
        through `take`.
        """
        if type(self) is not TensorObserver or not self.reads_in_c or self.shards is not None:
            return None
        if self._reader is None and _FLAG in vars(torch.compiler):
            self._reader = kernels.Reader(
                compiler=vars(torch.compiler),
                tracing=torch._C._is_tracing,
                backward_task=torch._C._current_graph_task_id,
                tensor=Tensor,
                parameter=torch.nn.Parameter,
                steps=steps,
                recorder=self.recorder,
                mode_is_on=mode_is_on,
                grad_enabled=torch.is_grad_enabled,
                compiler_callback=eval_frame.get_eval_frame_callback,
            )
        return self._reader

    def use_shards(self, shards: ShardRegistry) -> None:
        """Note from now on which shard each tensor is; C cannot do that."""
        self.shards = shards
        if self._reader is not None:
            self._reader.disable()

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Reduce a tensor into the step's table. Return the row, or −1; errors are counted and not raised."""
        armed = step.armed & point.probes
        if not armed:
            return -1
        if self.reads_in_c and type(tensor) in PLAIN and self.shards is None:
            try:
                row = step.table.record_tensor(point.key, armed, armed & step.hist != 0, recomputed, tensor)
            except Exception:
                row = -1  # the general path counts what cannot be recorded
            if row >= 0:
                if armed & point.keeping:
                    self._keep(point, tensor, step, armed, row)
                return row
        if mode_is_on():
            with without_torch_function():
                return self.take(point, tensor, step, recomputed)
        if self.shards is not None and point.key not in self.shards.known:
            self._record_shard(point, tensor)
        try:
            if type(tensor) in PLAIN and tensor.is_cpu and tensor.is_contiguous() and not armed & point.keeping:
                shape, table, want = tensor.shape, step.table, armed & step.hist != 0
                # Lazy negation comes with views of complex numbers, of which only single elements are contiguous.
                if ((shape and shape[-1] != 1) or not tensor.is_neg()) and not tensor.is_conj():
                    code, address = CODES[tensor.dtype], tensor.data_ptr()
                    row = table.record_if_room(point.key, armed, want, recomputed, code, address, shape, None)
                    if row < 0:
                        row = table.record(point.key, armed, want, recomputed, code, address, shape, None)
                    return row if row >= 0 else self._too_late()
        except Exception:
            pass  # no plain memory: sparse, quantised, nested, wrapped by vmap
        with without_torch_function():
            return self._take_any(point, tensor, step, armed, recomputed)

    def _keep(self, point: Point, tensor: Tensor, step: OpenStep, armed: int, row: int) -> None:
        """Keep elements of a dense tensor on the host, whose row is written."""
        elements = self.recorder.elements
        try:
            with DisableTorchFunction():
                buffer = Buffer(tensor.data_ptr(), CODES[tensor.dtype], tuple(tensor.shape), None, tensor)
                if not armed & elements.with_functions:
                    elements.keep_memory(step.table, row, point, armed, view_of(buffer))
                    return
                elements.keep_by(
                    step.table, row, point, armed,
                    lambda keeper: keeper.pick(view_of(buffer), point.text),
                    lambda function: function(tensor_for_function(tensor)),
                )  # fmt: skip
        except Exception as error:
            self.recorder.counters.failed("skipped_tensors", f"recording {point.text}", error)

    def take_all(self, found: Sequence[tuple[Point, Tensor]], step: OpenStep) -> list[int]:
        """Reduce several tensors in their order, in one call where that can be. Return their rows, as `take` does."""
        if not self.records_many or len(found) < 2:
            return [self.take(point, tensor, step) for point, tensor in found]
        entries = np.array([entry_for(point, tensor, step) for point, tensor in found], np.int64)
        tensors = tuple([tensor for _, tensor in found])
        i = 0
        while (i := step.table.record_many(entries, tensors, i)) < len(found):
            entries[i, 3] = self.take(*found[i], step)
            i += 1
        rows: list[int] = entries[:, 3].tolist()
        return rows

    @property
    def records_many(self) -> bool:
        """Return whether the kernel may read several tensors in one call."""
        return self.reads_in_c and self.shards is None

    def _take_any(self, point: Point, tensor: Tensor, step: OpenStep, armed: int, recomputed: bool) -> int:
        try:
            plain = values_of(tensor)
            if plain is None:
                return self._without_values(point, tensor, step, armed, recomputed)
            if self.devices.wants(plain):
                return self._take_on_device(point, plain, tensor, step, armed, recomputed)
            buffer = buffer_of_plain(plain)
            row = step.table.record(
                point.key, armed, armed & step.hist != 0, recomputed,
                buffer.dtype, buffer.address, buffer.shape, buffer.strides,
            )  # fmt: skip
            if row < 0:
                return self._too_late()
            if armed & point.keeping:
                self.recorder.elements.keep(step.table, row, point, armed, buffer, tensor_for_function(tensor))
            return row
        except Exception as error:
            self.recorder.counters.failed("skipped_tensors", f"recording {point.text}", error)
            return -1

    def _take_on_device(
        self, point: Point, plain: Tensor, tensor: Tensor, step: OpenStep, armed: int, recomputed: bool
    ) -> int:
        row = self.devices.take(point, plain, tensor, step, armed, recomputed)
        if row != -2:
            return row
        self.recorder.counters.add("tensors_in_cuda_graphs")
        self.recorder.counters.warn("cuda_graphs", _CAPTURED)
        return self._without_values(point, tensor, step, armed, recomputed)

    def _record_shard(self, point: Point, tensor: Tensor) -> None:
        try:
            assert self.shards is not None
            self.shards.record(point, tensor)
        except Exception as error:
            self.recorder.counters.failed("skipped_parts", f"finding which shard {point.text} holds", error)

    def _without_values(self, point: Point, tensor: Tensor, step: OpenStep, armed: int, recomputed: bool) -> int:
        """Record the metadata of a tensor that has a shape but no values here."""
        self.recorder.counters.add("tensors_without_values")
        values = row_without_values(tensor.numel())
        row = step.table.insert(point.key, armed, recomputed, CODES[tensor.dtype], tuple(tensor.shape), values)
        return row if row >= 0 else self._too_late()

    def not_entered(self, kind: type) -> None:
        """Count an object that cannot be looked into, and name its type once."""
        self.not_entered_by_name(f"{kind.__module__}.{kind.__qualname__}")

    def not_entered_by_name(self, name: str) -> None:
        """Count an object of a class that is known by its name only."""
        self.recorder.counters.add("objects_not_entered")
        self.recorder.counters.warn(f"objects_not_entered:{name}", _NOT_ENTERED.format(name))

    def _too_late(self) -> int:
        """Count a tensor whose step was closed by another thread while the tensor was being read."""
        self.recorder.counters.add("late_records")
        return -1


def _reads_in_c() -> bool:
    """Return whether C asks PyTorch itself where tensors lie. `TENSORTAP_HOOK=python` has Python ask, as tests do."""
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # PyTorch has it from 2.9 on
    return os.environ.get(HOOK_VARIABLE) != "python" and api is not None and kernels.use_exchange(api)


def without_torch_function() -> Any:
    """Return a context in which no function mode and no subclass of Tensor sees our calls on a tensor."""
    return torch._C.DisableTorchFunction()


def use_point(hook: kernels.NativeHook, point: Point) -> None:
    """Let a hook record the tensors of a point in C from now on."""
    hook.use_point(point.key, point.probes, point.keeping)
    if point.whole and hasattr(hook, "keep_whole"):  # not in an extension that was built before
        hook.keep_whole(point.whole)


def answered_in_c(cls: type[H]) -> type[H]:
    """Have C answer the calls of a class of hooks, and call the class's own `__call__` where it gives up.

    The class goes on showing its `__call__`: the compiler traces what it finds there, and cannot follow C.
    """
    shown = vars(cls)["__call__"]
    if kernels.show_call is not None:
        del cls.__call__
        kernels.show_call(cls, shown)
    return cls


class DeviceObserver(TensorObserver):
    """Reduce CPU tensors the way a device's are, for tests."""

    __slots__ = ()
    records_many = False

    def take_all(self, found: Sequence[tuple[Point, Tensor]], step: OpenStep) -> list[int]:
        """Reduce several tensors one by one."""
        return [self.take(point, tensor, step) for point, tensor in found]

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Reduce a tensor by the general path."""
        armed = step.armed & point.probes
        if not armed:
            return -1
        if self.shards is not None and point.key not in self.shards.known:
            self._record_shard(point, tensor)
        with without_torch_function():  # our function mode would take the reduction for the model's operations
            return self._take_any(point, tensor, step, armed, recomputed)


def entry_for(point: Point, tensor: Tensor, step: OpenStep) -> tuple[int, int, int, int]:
    """Return the kernel's entry for a tensor; a negative key leaves the tensor to `take`."""
    armed = step.armed & point.probes
    plain = armed and not armed & point.keeping and type(tensor) in PLAIN
    return point.key if plain else -1, armed, int(armed & step.hist != 0), -1


def observer_for(recorder: Recorder) -> TensorObserver:
    """Return the observer to use: `TENSORTAP_DEVICE_PATH` decides."""
    return DeviceObserver(recorder) if os.environ.get(VARIABLE) else TensorObserver(recorder)
