"""Variables that a graph writes and the host reads. They can be made at any time, also while a function is retraced."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def host_variable(value: Any, dtype: Any = None, shape: Any = None) -> Any:
    """Return a variable with a first value.

    Not a `tf.Variable`: a function that is traced a second time must not make those, because the user's own would be
    made twice.
    """
    with tf.init_scope():
        return ResourceVariable(tf.constant(value, dtype), shape=shape, trainable=False)


def read_variable(variable: Any) -> npt.NDArray[Any]:
    """Return, on the host, what a variable holds, without a copy. The operation costs a third of the method."""
    return np.asarray(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))


class LoopVariable:
    """A variable that the body of a loop uses, forward or backward, by a handle of its own.

    The backward pass of a loop differentiates every variable that it knows, and makes zeros of its shape; this handle
    hides the variable. It accepts only what the function around the loop has captured. XLA refuses a variable that
    comes by two handles, so one that is used in loops is used by this one everywhere.
    """

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        with tf.init_scope():
            self.handle = tf.raw_ops.Identity(input=variable.handle)

    def read(self) -> Any:
        """Return what it holds."""
        value = tf.raw_ops.ReadVariableOp(resource=self._captured(), dtype=self.variable.dtype)
        value.set_shape(self.variable.shape)
        return value

    def assign(self, value: Any) -> None:
        """Replace what it holds."""
        tf.raw_ops.AssignVariableOp(resource=self._captured(), value=value)

    def add(self, value: Any) -> None:
        """Add to what it holds."""
        tf.raw_ops.AssignAddVariableOp(resource=self._captured(), value=value)

    def assign_row(self, number: Any, row: Any) -> None:
        """Replace one row. XLA has no assignment to a slice."""
        self.assign(tf.tensor_scatter_nd_update(self.read(), [[number]], row[None]))

    def _captured(self) -> Any:
        graph = tf.compat.v1.get_default_graph()
        while isinstance(graph, ControlFlowFuncGraph):
            graph = graph.outer_graph
        return graph.capture(self.handle)
