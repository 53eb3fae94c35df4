"""Keras on JAX: arrays in hand, and what `fit` compiles, which tells its values by callbacks.

A compiled function of JAX has nothing of its own to write to, so every tensor that is tapped leaves through a
callback: it costs more than on TensorFlow.
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
from tensortap.adapters.keras.backend import Backend, Undo
from tensortap.adapters.keras.layers import Variable
from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.keras.steps import KerasStepDetector
from tensortap.adapters.protocol import Clock, Port
from tensortap.record.recorder import OpenStep, Point


class JaxSight(Sight):
    """Records arrays in hand; lets compiled functions call back with the others."""

    _wait = False
    model: Callable[[], Any] = staticmethod(lambda: None)

    def in_hand(self, tensor: Any) -> bool:
        """Whether it has values."""
        return not isinstance(tensor, jax.core.Tracer)

    def tracing(self) -> bool:
        """Whether a transformation is at work, as far as JAX tells."""
        return not trace_state_clean()

    def hold(self, point: Point, tensor: Any) -> None:
        """Be called with its values when they are there."""
        self._wait = True
        jax.debug.callback(partial(self._came, point), tensor)

    def collect(self, step: OpenStep) -> None:
        """Wait for all callbacks."""
        if self._wait:
            jax.effects_barrier()

    def followed(self, tensor: Any, see: Callable[[Any], None]) -> Any:
        """By an identity whose backward is seen."""
        if not isinstance(tensor, jax.Array) or not jax.numpy.issubdtype(tensor.dtype, jax.numpy.inexact):
            return None

        @jax.custom_vjp
        def identity(x: Any) -> Any:
            return x

        def backward(_: Any, dy: Any) -> tuple[Any]:
            see(dy)
            return (dy,)

        identity.defvjp(lambda x: (x, None), backward)
        return identity(tensor)

    def variable(self, variable: Any) -> Any:
        """While `fit` runs, variables are empty, and their values are in the state of the model."""
        model = self.model()
        if variable._value is not None or model is None:
            return super().variable(variable)
        for kind in ("trainable_variables", "non_trainable_variables"):
            for other, value in zip(getattr(model, kind), model._jax_state[kind], strict=True):
                if other is variable:
                    return self.array(value)
        raise LookupError(f"{variable.path} is no variable of the model")

    def lost(self, loss: Any) -> None:
        """The loss, now or when the function has run."""
        if self.in_hand(loss):
            super().lost(loss)
        else:
            self._wait = True
            jax.debug.callback(super().lost, loss)

    def _came(self, point: Point, value: Any) -> None:
        try:
            self.take(point, np.asarray(value))
        except Exception as error:  # a callback has nobody to catch it
            self.observer.recorder.counters.note("skipped_tensors", f"recording {point.text}", error)


class OnJax(Backend):
    """One tap's view of JAX."""

    sight: JaxSight

    def __init__(self, observer: ArrayObserver, clock: Clock, limits: Sequence[tuple[str, float]]) -> None:
        super().__init__(JaxSight(observer, KerasStepDetector(observer.recorder, clock)))

    def watch(self, model: Any, gradients: Sequence[tuple[Variable, Port]]) -> list[Undo]:
        """See training steps, and know whose they are."""
        self.sight.model = weakref.ref(model)
        return super().watch(model, gradients)
