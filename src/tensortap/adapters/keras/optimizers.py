"""Gradients of weights, as Keras's optimizers are given them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import keras

_LOCK: Final = threading.Lock()
Given = Callable[[Any, Any], None]


class Optimizers:
    """Sees the gradients that Keras's optimizers are given, whichever of them, while anybody watches."""

    def __init__(self) -> None:
        self._watchers: tuple[Given, ...] = ()
        self._original: Any = None

    def join(self, watcher: Given) -> None:
        """Call it with every gradient and its variable."""
        with _LOCK:
            if not self._watchers:
                self._put()
            self._watchers = (*self._watchers, watcher)

    def leave(self, watcher: Given) -> None:
        """Call it no more; with the last one the class has its own method back."""
        with _LOCK:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)
            cls = _base()
            if not self._watchers and getattr(vars(cls)["apply"], "tensortap", None) is self:
                cls.apply = self._original

    def _put(self) -> None:
        original = self._original = vars(_base())["apply"]

        @functools.wraps(original)
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
            for watcher in self._watchers:
                for grad, variable in zip(grads, variables, strict=False):
                    watcher(grad, variable)
            return original(optimizer, grads, trainable_variables if trainable_variables is None else variables)

        apply.tensortap = self  # type: ignore[attr-defined]
        _base().apply = apply


def _base() -> Any:
    """The class whose `apply` all optimizers use."""
    return next(cls for cls in keras.optimizers.Optimizer.__mro__ if "apply" in vars(cls))


OPTIMIZERS: Final = Optimizers()
