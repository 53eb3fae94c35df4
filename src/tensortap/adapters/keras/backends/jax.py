"""Keras on JAX: arrays with values, and what `fit` compiles, whose values come by callbacks.

A compiled function of JAX has no variables that it could write to, so every observed tensor leaves by a callback. That
costs more than on TensorFlow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src.core import trace_state_clean

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.backends.base import KerasBackend, Undo
from tensortap.adapters.keras.layers import KerasVariable
from tensortap.adapters.keras.observer import KerasObserver, KerasStepDetector
from tensortap.adapters.plan import Port
from tensortap.record.recorder import OpenStep, Point


class KerasJaxObserver(KerasObserver):
    """Record arrays that have values; let compiled functions call back with the others."""

    _has_callbacks = False
    model: Callable[[], Any] = staticmethod(lambda: None)

    def has_values(self, tensor: Any) -> bool:
        """Return whether it is an array rather than a tracer."""
        return not isinstance(tensor, jax.core.Tracer)

    def tracing(self) -> bool:
        """Return whether a transformation is active, as far as JAX tells."""
        return not trace_state_clean()

    def defer(self, point: Point, tensor: Any) -> None:
        """Add a callback to the compiled function, which receives the values."""
        self._has_callbacks = True
        jax.debug.callback(partial(self._receive, point), tensor)

    def collect(self, step: OpenStep) -> None:
        """Wait for all callbacks."""
        if self._has_callbacks:
            jax.effects_barrier()

    def with_gradient_hook(self, tensor: Any, hook: Callable[[Any], None]) -> Any:
        """Return the tensor through an identity whose backward calls the hook."""
        if not isinstance(tensor, jax.Array) or not jax.numpy.issubdtype(tensor.dtype, jax.numpy.inexact):
            return None

        @jax.custom_vjp
        def identity(x: Any) -> Any:
            return x

        def backward(_: Any, dy: Any) -> tuple[Any]:
            hook(dy)
            return (dy,)

        identity.defvjp(lambda x: (x, None), backward)
        return identity(tensor)

    def variable(self, variable: Any) -> Any:
        """Return a variable's elements. While `fit` runs they are in the model's state, and the variables are empty."""
        model = self.model()
        if variable._value is not None or model is None:
            return super().variable(variable)
        for kind in ("trainable_variables", "non_trainable_variables"):
            for other, value in zip(getattr(model, kind), model._jax_state[kind], strict=True):
                if other is variable:
                    return self.array(value)
        raise LookupError(f"{variable.path} is not a variable of the model")

    def observe_loss(self, loss: Any) -> None:
        """Note the loss, now or when the function has run."""
        if self.has_values(loss):
            super().observe_loss(loss)
        else:
            self._has_callbacks = True
            jax.debug.callback(super().observe_loss, loss)

    def _receive(self, point: Point, value: Any) -> None:
        try:
            self.record(point, np.asarray(value))
        except Exception as error:  # inside a callback no caller could catch it
            self.arrays.recorder.counters.note("skipped_tensors", f"recording {point.text}", error)


class KerasOnJax(KerasBackend):
    """One tap's side of JAX."""

    observer: KerasJaxObserver

    def __init__(self, arrays: ArrayObserver, limits: Sequence[tuple[str, float]]) -> None:
        super().__init__(KerasJaxObserver(arrays, KerasStepDetector(arrays.recorder)))

    def attach_training(self, model: Any, gradients: Sequence[tuple[KerasVariable, Port]]) -> list[Undo]:
        """Observe training steps, and note which model each belongs to."""
        self.observer.model = weakref.ref(model)
        return super().attach_training(model, gradients)
