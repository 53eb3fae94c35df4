"""Custom training loops of Keras scripts: calls of models, of losses and of `optimizer.apply`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

import keras
import numpy as np

from tensortap.adapters.keras.context.recorder import CONTEXTS, KerasContext

_BACKEND: Final = keras.backend.backend()


class CustomLoops:
    """Report models that are called outside of `fit`, and the losses and steps of their training loops.

    Nothing here raises into the script: contexts keep their errors to themselves.
    """

    def __init__(self, meet: Callable[[Any], None], is_built: Callable[[Any], bool]) -> None:
        self.inside = 0  # methods of Keras that run batches, and calls of models
        self._meet, self._is_built = meet, is_built
        self._called: weakref.ref[Any] | None = None
        self._undo: list[Callable[[], None]] = [
            _replace(keras.Model, "__call__", self._model),
            _replace(keras.losses.Loss, "__call__", self._loss),
            _replace(keras.optimizers.Optimizer, "apply", self._apply),
        ]

    def stop(self) -> None:
        """Put the methods back."""
        for undo in self._undo:
            undo()

    def _model(self, method: Any) -> Any:
        @functools.wraps(method)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.inside and _is_concrete(args, kwargs) and self._is_built(model):
                self._meet(model)
                self._called = weakref.ref(model)
            self.inside += 1
            try:
                return method(model, *args, **kwargs)
            finally:
                self.inside -= 1

        return call

    def _loss(self, method: Any) -> Any:
        @functools.wraps(method)
        def call(loss: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
            context = self._context()
            if context is not None and _is_concrete((y_true, y_pred), {}):
                context.loss_called(loss, y_true, y_pred)
            return method(loss, y_true, y_pred, *args, **kwargs)

        return call

    def _apply(self, method: Any) -> Any:
        @functools.wraps(method)
        def apply(optimizer: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            context = self._context()
            if context is None or not _is_concrete(tuple(gradients), {}):
                return method(optimizer, gradients, *args, **kwargs)
            context.optimizer = optimizer
            context.before_step("train", ())
            result = method(optimizer, gradients, *args, **kwargs)
            context.after_step("train", None)
            return result

        return apply

    def _context(self) -> KerasContext | None:
        model = None if self.inside or self._called is None else self._called()
        return None if model is None else CONTEXTS.get(model)


def _replace(cls: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    own, ours = vars(cls).get(name), wrap(getattr(cls, name))
    setattr(cls, name, ours)

    def undo() -> None:
        if vars(cls).get(name) is not ours:
            return  # another library has replaced it in turn
        if own is not None:
            setattr(cls, name, own)
        else:
            delattr(cls, name)

    return undo


def _is_concrete(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether arguments hold values: a model may also be called while a graph is built or traced."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, np.ndarray) or _is_tensor(value)]
    return bool(found) and all(map(_has_values, found))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, keras.KerasTensor) or bool(keras.ops.is_tensor(value))


def _has_values(value: Any) -> bool:
    if isinstance(value, keras.KerasTensor):
        return False
    if isinstance(value, np.ndarray) or _BACKEND == "torch":
        return True
    if _BACKEND == "jax":
        return not type(value).__name__.endswith("Tracer")
    return hasattr(value, "numpy")
