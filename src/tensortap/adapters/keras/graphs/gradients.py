"""Return a tensor with the same values whose gradient is given to a hook.

The tensor goes through an identity whose backward calls the hook. Where a loss asks a graph tensor for the operation
that made it (Keras: "is this the output of a softmax?"), the operation is repeated instead, so that the answer is the
same; TensorFlow computes it once, as both have the same input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops

GradientHook = Callable[[Any], None]
_ASKED_FOR: Final = ("Sigmoid", "Softmax")
_NUMBERS: Final = itertools.count()
_HOOKS: Final = "_tensortap_gradient_hooks"  # an attribute of graph tensors that were repeated


def with_gradient_hook(tensor: Any, hook: GradientHook) -> Any:
    """Return the tensor, with a hook that is called with its gradient."""
    return _repeated(tensor, hook) if is_asked_for(tensor) else _identity(tensor, hook)


def is_asked_for(tensor: Any) -> bool:
    """Return whether a loss of Keras would recognise a graph tensor by its operation."""
    return not tf.executing_eagerly() and not hasattr(tensor, "numpy") and tensor.op.type in _ASKED_FOR


def _identity(tensor: Any, hook: GradientHook) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(x: Any) -> Any:
        def backward(dy: Any) -> Any:
            hook(dy)
            return dy

        return tf.identity(x), backward

    return identity(tensor)


def _repeated(tensor: Any, hook: GradientHook) -> Any:
    kind, name = tensor.op.type, f"TensortapGradient-{next(_NUMBERS)}"

    @tf.RegisterGradient(name)  # type: ignore[untyped-decorator]  # for a function that is differentiated as a whole
    def gradient(repeated: Any, dy: Any) -> Any:
        all_hooks(dy)
        return ops._gradient_registry.lookup(kind)(repeated, dy)

    def backward(dy: Any) -> Any:  # for a tape
        hook(dy)
        return [dy]

    def all_hooks(dy: Any) -> None:  # this way the gradient goes past a tensor that was itself repeated
        hook(dy)
        if earlier is not None:
            earlier(dy)

    earlier = getattr(tensor, _HOOKS, None)
    with record.stop_recording(), tensor.graph.gradient_override_map({kind: name}):
        repeated = _OPERATIONS[kind](tensor.op.inputs[0])
    setattr(repeated, _HOOKS, all_hooks)
    record.record_operation("TensortapGradient", [repeated], [tensor], backward)
    return repeated


_OPERATIONS: Final = {
    "Sigmoid": lambda x: tf.raw_ops.Sigmoid(x=x),
    "Softmax": lambda x: tf.raw_ops.Softmax(logits=x),
}
