"""Single operations of TensorFlow while layers run, where patterns ask for them: `op:MatMul`, `dense/BiasAdd`."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from tensortap.adapters.keras.observer import KerasObserver
from tensortap.adapters.operations import Groups, OperationTaps, operation_patterns
from tensortap.adapters.plan import Plan
from tensortap.select.sites import Pattern

GROUPS: Final[Groups] = {
    "matmul": frozenset(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "SparseMatMul"))
}
KNOWN: Final = frozenset(name for name in dir(tf.raw_ops) if name[0].isupper())


class _RunningLayers(threading.local):
    """The layers that are running in a thread."""

    def __init__(self) -> None:
        self.layers: list[tuple[str, Counter[str]]] = []  # those that run in this thread, with their operations' counts
        self.busy = False  # an operation is being recorded


class KerasOperations(OperationTaps):
    """The operations that layers run, for one tap: each under the innermost layer, numbered by kind."""

    groups = GROUPS
    missed = "no such operation ran inside a layer in a step that was observed"

    def __init__(self, observer: KerasObserver, plan: Plan, patterns: list[Pattern]) -> None:
        super().__init__(observer.arrays, observer.steps, plan, patterns)
        self._tensors = observer
        self._running = _RunningLayers()

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Observe the operations of a layer while it runs."""
        layers = self._running.layers
        if not layers:
            op_callbacks.add_op_callback(self._on_operation)
        layers.append((path, Counter()))
        try:
            yield
        finally:
            layers.pop()
            if not layers:
                op_callbacks.remove_op_callback(self._on_operation)

    def _on_operation(
        self,
        op_type: Any,
        inputs: Sequence[Any],
        attrs: Any,
        outputs: Sequence[Any],
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        running = self._running
        if running.busy or not running.layers:
            return
        name = op_type.decode() if isinstance(op_type, bytes) else str(op_type)
        path, count = running.layers[-1]
        number = count[name]
        count[name] += 1
        running.busy = True  # keeping a tensor may take operations of our own
        try:
            self._observe_port(self.port(path, name, number, "input"), inputs)
            self._observe_port(self.port(path, name, number, "output"), outputs)
        finally:
            running.busy = False

    def _observe_port(self, port: Any, values: Sequence[Any]) -> None:
        if port is not None and self._tensors.wants(port.bits):
            found = self._tensors.tensors_in(list(values))
            self._tensors.observe([port], [("", found[0][1])] if len(found) == 1 else found)


def operations(observer: KerasObserver, plan: Plan, paths: Sequence[str]) -> KerasOperations | None:
    """Return an observer for the operations that patterns match; None if there is no such pattern."""
    patterns = operation_patterns(plan, paths, KNOWN, GROUPS)
    return KerasOperations(observer, plan, patterns) if patterns else None
