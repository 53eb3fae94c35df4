"""Training, test and prediction steps for one tap: their functions, their graphs, and the loss in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tensortap.adapters.keras import functions
from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.keras.standins import Around, join

_STEPS = ("train_step", "test_step", "predict_step")


class Training:
    """Sees the steps of one model."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight

    def watch(self, model: Any) -> list[Callable[[], None]]:
        """Put taps on; what takes each off again."""
        undo = [join(model, name, self._trace) for name in _STEPS if hasattr(model, name)]
        if hasattr(model, "compute_loss"):
            undo.append(join(model, "compute_loss", self._loss))
        if hasattr(model, "export"):
            undo.append(join(model, "export", self._export))
        return [*undo, *functions.watch(model, self._phase)]

    def _phase(self, phase: str) -> Around:
        return partial(self._step, phase)

    def _step(self, phase: str, call: Callable[..., Any], *args: Any) -> Any:
        """One call of the function behind `fit` and the others, on the host."""
        sight = self._sight
        sight.begin()
        try:
            sight.steps.current().phase = phase
            result = call(*args)
            self._collect()
            return result
        except StopIteration:
            sight.steps.cancel()
            raise
        finally:
            sight.end()

    def _trace(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One step, eagerly or while it is traced."""
        with self._sight.function():
            return call(*args, **kwargs)

    def _loss(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = call(*args, **kwargs)
        if loss is not None and not in_symbolic_scope():  # there Keras only asks for shapes
            self._guarded(partial(self._sight.lost, loss), "reading the loss")
        return loss

    def _export(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What is exported is the model without taps."""
        with self._sight.averted():
            return call(*args, **kwargs)

    def _collect(self) -> None:
        step = self._sight.steps.current()
        self._guarded(partial(self._sight.collect, step), "reading what a step left")

    def _guarded(self, act: Callable[[], None], what: str) -> None:
        try:
            act()
        except Exception as error:
            self._sight.observer.recorder.counters.failed("skipped_tensors", what, error)
