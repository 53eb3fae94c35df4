"""Training, test and prediction steps of a Keras model: their functions, their graphs, and the loss.

Keras keeps the functions that `fit`, `evaluate` and `predict` call for every step in attributes of the model, and
traces them once. A `StepFunctionWrapper` takes such a function's place: its first call makes the function anew, with
the taps that are on now; the function that was there before, with all its traces, comes back at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tensortap.adapters.keras.context.recorder import KerasContext
from tensortap.adapters.keras.observer import KerasObserver
from tensortap.adapters.keras.wrappers import CallHook, MethodWrapper, through, wrap_method

# The attribute, the method that fills it, and the phase of its steps.
STEP_FUNCTIONS: Final = (
    ("train_function", "make_train_function", "train"),
    ("test_function", "make_test_function", "eval"),
    ("predict_function", "make_predict_function", "predict"),
)
_STEP_METHODS: Final = ("train_step", "test_step", "predict_step")
Undo = Callable[[], None]


class TrainingTaps:
    """Observe the steps of one model for one tap."""

    def __init__(self, observer: KerasObserver, context: KerasContext | None = None) -> None:
        self._observer = observer
        self._context = context

    def attach(self, model: Any) -> list[Undo]:
        """Put hooks on a model; return what takes each off again."""
        undo = [wrap_method(model, name, self._trace) for name in _STEP_METHODS if hasattr(model, name)]
        if hasattr(model, "compute_loss"):
            undo.append(wrap_method(model, "compute_loss", self._loss))
        if hasattr(model, "export"):
            undo.append(wrap_method(model, "export", self._export))
        return [*undo, *_wrap_step_functions(model, lambda phase: partial(self._step, phase))]

    def _step(self, phase: str, call: Callable[..., Any], *args: Any) -> Any:
        """Run one call, on the host, of the function behind `fit`, `evaluate` or `predict`."""
        observer = self._observer
        observer.steps.begin_call()
        try:
            observer.steps.current().phase = phase
            if self._context is not None:
                self._context.before_step(phase, args)
            result = call(*args)
            if self._context is not None:
                self._context.after_step(phase, result)
            self._collect()
            return result
        except StopIteration:
            observer.steps.cancel()
            raise
        finally:
            observer.steps.end_call()

    def _trace(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run or trace one step."""
        with self._observer.traced_function():
            return call(*args, **kwargs)

    def _loss(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = call(*args, **kwargs)
        if loss is not None and not in_symbolic_scope():  # where Keras only infers shapes
            self._guarded(partial(self._observer.observe_loss, loss), "reading the loss")
        return loss

    def _export(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Export the model without taps."""
        with self._observer.pause():
            return call(*args, **kwargs)

    def _collect(self) -> None:
        step = self._observer.steps.current()
        self._guarded(partial(self._observer.collect, step), "reading what a step left")

    def _guarded(self, act: Callable[[], None], what: str) -> None:
        try:
            act()
        except Exception as error:
            self._observer.arrays.recorder.counters.failed("skipped_tensors", what, error)


class StepFunctionWrapper:
    """Take the place of `train_function`, `test_function` or `predict_function`."""

    def __init__(self, model: Any, attribute: str, maker: str) -> None:
        self._model = weakref.ref(model)
        self._attribute = attribute
        self._maker = maker
        self.saved = vars(model).get(attribute)
        self.inner: Any = None
        self.hooks: tuple[CallHook, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Run one step, or as many as Keras runs at once."""
        if self.inner is None:
            self.inner = self.make()
            object.__setattr__(self._model(), self._attribute, self)
        return through(self.hooks, self.inner)(*args)

    def make(self) -> Any:
        """Make a new function by Keras's own method, which puts it into the attribute."""
        model = self._model()
        method = getattr(model, self._maker)
        (method.original if isinstance(method, MethodWrapper) else method)(force=True)
        return vars(model)[self._attribute]

    def change(self, hooks: tuple[CallHook, ...]) -> None:
        """Use other hooks: the next call traces again. Without hooks, restore the original function."""
        self.hooks, self.inner = hooks, None
        model = self._model()
        if hooks or model is None or vars(model).get(self._attribute) is not self:
            return
        if self.saved is not None:
            object.__setattr__(model, self._attribute, self.saved)
        else:  # `fit` may be running, and must find a function; it is traced when it is first called
            self.make()


def _wrap_step_functions(model: Any, hook_for: Callable[[str], CallHook]) -> list[Undo]:
    return [
        _wrap_step_function(model, attribute, maker, hook_for(phase))
        for attribute, maker, phase in STEP_FUNCTIONS
        if hasattr(model, maker)
    ]


def _wrap_step_function(model: Any, attribute: str, maker: str, hook: CallHook) -> Undo:
    def made(call: Any, force: bool = False) -> Any:
        wrapper = _wrapper_of(model, attribute, maker)
        if hook not in wrapper.hooks or force:
            wrapper.change((*(other for other in wrapper.hooks if other is not hook), hook))
        call(force=False)  # other taps' hooks; in the end Keras's own method, which finds a function and returns
        return wrapper

    def undo() -> None:
        unwrap_maker()
        wrapper = vars(model).get(attribute)
        if isinstance(wrapper, StepFunctionWrapper) and hook in wrapper.hooks:
            wrapper.change(tuple(other for other in wrapper.hooks if other is not hook))

    unwrap_maker = wrap_method(model, maker, made)
    if vars(model).get(attribute) is not None:
        made(lambda force: None)
    return undo


def _wrapper_of(model: Any, attribute: str, maker: str) -> StepFunctionWrapper:
    held = vars(model).get(attribute)
    if not isinstance(held, StepFunctionWrapper):
        held = StepFunctionWrapper(model, attribute, maker)
        object.__setattr__(model, attribute, held)
    return held
