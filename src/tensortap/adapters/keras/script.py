"""Find the models of a Keras script for `tensortap run`: those that it trains, evaluates or predicts with."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Final

import keras

from tensortap.adapters.keras.context.recorder import LINES
from tensortap.adapters.keras.custom_loops import CustomLoops
from tensortap.context.caller import line_of_user

ENTRIES: Final = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class KerasScriptWatcher:
    """Report every model before Keras runs its first batch. On any backend these methods are what runs batches.

    A model that is not built yet has no layers to watch: Keras builds it in `fit`, and a callback tells when it has.
    Nothing here raises into the script.
    """

    def __init__(self, begin: Callable[[Any], None]) -> None:
        self._begin = begin
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._own = {name: vars(keras.Model)[name] for name in ENTRIES if name in vars(keras.Model)}
        for name in ENTRIES:
            setattr(keras.Model, name, self._wrapped(getattr(keras.Model, name)))
        self._loops = CustomLoops(self.meet, _is_built)
        self._lines = [_note_line(keras.Model, "compile"), _note_line(keras.optimizers.Optimizer, "__init__")]

    def stop(self) -> None:
        """Put the methods back."""
        self._loops.stop()
        for undo in self._lines:
            undo()
        for name in ENTRIES:
            if name in self._own:
                setattr(keras.Model, name, self._own[name])
            else:
                delattr(keras.Model, name)

    def meet(self, model: Any) -> None:
        """Report a model, once, unless it is a layer of a known one."""
        if model not in self._known:
            inside = any(model is layer for known in self._known for layer in known._flatten_layers())
            self._known.add(model)
            if not inside:
                self._begin(model)

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        takes_callbacks = "callbacks" in inspect.signature(method).parameters

        @functools.wraps(method)
        def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_built(model):
                self.meet(model)
            elif model not in self._known and takes_callbacks:
                args, kwargs = self._with_callback(method, model, args, kwargs)
            self._loops.inside += 1
            try:
                result = method(model, *args, **kwargs)
            finally:
                self._loops.inside -= 1
            if not takes_callbacks:
                self.meet(model)  # its first batch has built it
            return result

        return wrapper

    def _with_callback(
        self, method: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            call = inspect.signature(method).bind(model, *args, **kwargs)
        except TypeError:  # Keras raises a better error
            return args, kwargs
        given = call.arguments.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            return args, kwargs
        others = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
        call.arguments["callbacks"] = [*others, _BuiltCallback(self.meet)]
        return call.args[1:], call.kwargs


class _BuiltCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Report the model when it is built and no batch has run."""

    def __init__(self, meet: Callable[[Any], None]) -> None:
        super().__init__()
        self.async_safe = True  # it reads no logs, so Keras need not wait for them
        self._meet = meet

    def on_train_begin(self, logs: Any = None) -> None:
        """Act when `fit` begins."""
        self._meet(self.model)

    def on_test_begin(self, logs: Any = None) -> None:
        """Act when `evaluate` begins."""
        self._meet(self.model)

    def on_predict_begin(self, logs: Any = None) -> None:
        """Act when `predict` begins."""
        self._meet(self.model)


def _note_line(cls: Any, name: str) -> Callable[[], None]:
    """Remember the line of the user's code that calls a method on an object; return what ends it.

    The method is replaced in the class that defines it: a loaded model is compiled only if `compile` is not overridden.
    """
    cls = next(owner for owner in cls.__mro__ if name in vars(owner))
    method = vars(cls)[name]

    @functools.wraps(method)
    def noting(this: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(this, *args, **kwargs)
        with contextlib.suppress(Exception):
            LINES[this] = line_of_user(2)
        return result

    setattr(cls, name, noting)
    return lambda: setattr(cls, name, method)


def _is_built(model: Any) -> bool:
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())
