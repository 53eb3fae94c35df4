"""Training, test and prediction steps for one tap: their functions, their graphs, and the loss in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tensortap.adapters.keras import functions
from tensortap.adapters.keras.hooks import begin, end, traced
from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.keras.standins import Around, join
from tensortap.adapters.keras.tensors import in_hand
from tensortap.recorder import OpenStep

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
        return [*undo, *functions.watch(model, self._phase)]

    def _phase(self, phase: str) -> Around:
        return partial(self._step, phase)

    def _step(self, phase: str, call: Callable[..., Any], *args: Any) -> Any:
        """One call of the function behind `fit` and the others, on the host."""
        sight = self._sight
        begin(sight)
        try:
            sight.steps.current().phase = phase
            result = call(*args)
            collect(sight, sight.steps.current())
            return result
        except StopIteration:
            sight.steps.cancel()
            raise
        finally:
            end(sight)

    def _trace(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One step, eagerly or while it is traced."""
        with traced(self._sight):
            return call(*args, **kwargs)

    def _loss(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = call(*args, **kwargs)
        if isinstance(loss, tf.Tensor) and not in_hand(loss):
            self._sight.graphs.lost(loss)
        elif loss is not None:
            self._sight.steps.current().metrics["loss"] = float(tf.reduce_mean(loss))
        return loss


def collect(sight: Sight, step: OpenStep) -> None:
    """Record what graphs have left."""
    try:
        loss = sight.graphs.loss()
        if loss is not None:
            step.metrics["loss"] = loss
        if step.armed:
            sight.graphs.collect(step)
    except Exception as error:
        sight.taker.recorder.ledger.failed("skipped_tensors", "reading what a graph left", error)
