"""Run a user's model for a quick look: one training step; save everything it can change, and restore it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import keras
import numpy as np
from keras.src.random.seed_generator import global_seed_generator

from tensortap.adapters.batches import copied
from tensortap.adapters.rng import preserve_rng_state


@contextmanager
def preserved(model: Any) -> Iterator[Callable[[], None]]:
    """Yield a function that puts variables and random states back; call it at the end."""
    variables = {id(v): v for v in (*variables_of_training(model), global_seed_generator().state)}
    kept = [(variable, np.array(variable.numpy(), copy=True)) for variable in variables.values()]
    restore_rng_state = preserve_rng_state()

    def restore() -> None:
        for variable, value in kept:
            variable.assign(value)
        restore_rng_state()

    try:
        yield restore
    finally:
        restore()


# Where `train_step` can be run eagerly; JAX's is a compiled function of the whole state.
_EAGER: Final = ("tensorflow", "torch")


def variables_of_training(model: Any) -> list[Any]:
    """Return the variables of a model, of its metrics and of its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *getattr(model, "metrics_variables", ()), *(optimizer.variables if optimizer else ())]
    return list({id(variable): variable for variable in found}.values())


def build(model: Any, step: Callable[[], Any]) -> None:
    """Run the step once, which makes a model's variables, and restore the values of those that existed."""
    if not model.built:
        step()
    if getattr(model, "optimizer", None) is not None:
        with preserved(model):
            step()
        model.reset_metrics()


def training_step(model: Any, batch: Any) -> Callable[[], Any] | None:
    """Return a function that trains a compiled model on a batch; None where there is no loss, or no eager step.

    The batch is `(x, y)` or `(x, y, sample_weight)`, or `x` alone, for which targets are made up.
    """
    if callable(batch) or not getattr(model, "compiled", False) or keras.backend.backend() not in _EAGER:
        return None
    if isinstance(batch, tuple) and len(batch) in (2, 3) and len(names_of_arguments(model)) == 1:
        _build_for_training(model, batch[0])
        return lambda: model.train_step(copied(batch, _copy))
    if isinstance(batch, (tuple, dict)):
        return None
    _build_for_training(model, batch)
    return next((partial(_train, model, batch, y) for y in _targets(model, batch) if _trains(model, batch, y)), None)


def _build_for_training(model: Any, x: Any) -> None:
    """Make the variables of model and optimizer by a call, which trains nothing."""
    if not model.built:
        model(x)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _train(model: Any, x: Any, y: Any) -> Any:
    return model.train_step(copied((x, y), _copy))


def _trains(model: Any, x: Any, y: Any) -> bool:
    """Return whether the loss and the metrics take these targets."""
    try:
        with preserved(model):
            _train(model, x, y)
    except Exception:
        return False
    return True


def _targets(model: Any, batch: Any) -> Iterator[Any]:
    """Yield targets that a loss may take: zeros and ones shaped like the output, or classes."""
    output = model(batch)
    if keras.ops.is_tensor(output):
        shape = tuple(int(size) for size in output.shape)
        yield (np.arange(np.prod(shape)) % 2).reshape(shape).astype("float32")
        yield np.zeros(shape[:-1], "int32")


def names_of_arguments(model: Any) -> list[str]:
    """Return the names of the model's arguments, as far as its signature tells."""
    parameters = inspect.signature(model.call).parameters
    return [name for name in parameters if name not in ("training", "mask", "args", "kwargs")]


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value if keras.ops.is_tensor(value) else None
