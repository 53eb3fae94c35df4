"""Variables that a graph writes and the host reads, made at any time: also while a function is traced again."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def cell(value: Any, dtype: Any = None, shape: Any = None) -> Any:
    """A variable with a first value.

    Not by `tf.Variable`, which a function that is traced a second time forbids, lest the user's own become two.
    """
    with tf.init_scope():
        return ResourceVariable(tf.constant(value, dtype), shape=shape, trainable=False)
