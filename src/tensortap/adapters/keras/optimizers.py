"""Gradients of weights, as Keras's optimizers receive them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import keras

_LOCK: Final = threading.Lock()
GradientHook = Callable[[Any, Any], None]


class KerasOptimizerHooks:
    """Call the registered hooks with the gradients that any Keras optimizer receives."""

    def __init__(self) -> None:
        self._hooks: tuple[GradientHook, ...] = ()
        self._original: Any = None
        self._wrapper: Any = None

    def add(self, hook: GradientHook) -> None:
        """Call a hook with every gradient and its variable."""
        with _LOCK:
            if not self._hooks:
                self._wrap()
            self._hooks = (*self._hooks, hook)

    def remove(self, hook: GradientHook) -> None:
        """Remove a hook; the last one gives the class its own method back."""
        with _LOCK:
            self._hooks = tuple(other for other in self._hooks if other is not hook)
            cls = _base()
            if not self._hooks and vars(cls)["apply"] is self._wrapper:
                cls.apply = self._original

    def _wrap(self) -> None:
        original = self._original = vars(_base())["apply"]

        @functools.wraps(original)
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
            for hook in self._hooks:
                for grad, variable in zip(grads, variables, strict=False):
                    hook(grad, variable)
            return original(optimizer, grads, trainable_variables if trainable_variables is None else variables)

        self._wrapper = _base().apply = apply


def _base() -> Any:
    """Return the class whose `apply` all optimizers use."""
    return next(cls for cls in keras.optimizers.Optimizer.__mro__ if "apply" in vars(cls))


OPTIMIZER_HOOKS: Final = KerasOptimizerHooks()
