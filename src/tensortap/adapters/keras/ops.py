"""Single operations of TensorFlow while layers run, where patterns ask for them: `op:MatMul`, `dense/BiasAdd`."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.numpy.ops import Groups, OpTaps, op_patterns
from tensortap.adapters.protocol import Plan
from tensortap.select.sites import Pattern

GROUPS: Final[Groups] = {
    "matmul": frozenset(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "SparseMatMul"))
}
KNOWN: Final = frozenset(name for name in dir(tf.raw_ops) if name[0].isupper())


class GraphOps(OpTaps):
    """All operations of one tap: those that layers run, each under the innermost layer, numbered by kind."""

    groups = GROUPS
    missed = "no such operation ran inside a layer in a step that was observed"

    def __init__(self, sight: Sight, plan: Plan, patterns: list[Pattern]) -> None:
        super().__init__(sight.observer, sight.steps, plan, patterns)
        self._sight = sight
        self._local = threading.local()

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """While a layer runs, its operations are seen."""
        stack = self._stack()
        if not stack:
            op_callbacks.add_op_callback(self._see)
        stack.append((path, Counter()))
        try:
            yield
        finally:
            stack.pop()
            if not stack:
                op_callbacks.remove_op_callback(self._see)

    def _stack(self) -> list[tuple[str, Counter[str]]]:
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.busy = [], False
        return self._local.stack  # type: ignore[no-any-return]

    def _see(
        self,
        op_type: Any,
        inputs: Sequence[Any],
        attrs: Any,
        outputs: Sequence[Any],
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        stack = self._stack()
        if self._local.busy or not stack:
            return
        name = op_type.decode() if isinstance(op_type, bytes) else str(op_type)
        path, count = stack[-1]
        number = count[name]
        count[name] += 1
        self._local.busy = True  # holding a tensor may take operations of our own
        try:
            self._record(path, name, number, "input", inputs)
            self._record(path, name, number, "output", outputs)
        finally:
            self._local.busy = False

    def _record(self, path: str, name: str, number: int, kind: str, values: Sequence[Any]) -> None:
        port = self.port(path, name, number, kind)
        if port is not None and self._sight.wants(port.bits):
            found = self._sight.found(list(values))
            self._sight.see([port], [("", found[0][1])] if len(found) == 1 else found)


def operations(sight: Sight, plan: Plan, paths: Sequence[str]) -> GraphOps | None:
    """What sees the operations that patterns ask for, if any do."""
    patterns = op_patterns(plan, paths, KNOWN, GROUPS)
    return GraphOps(sight, plan, patterns) if patterns else None
