"""Everything a call of a model can change, kept and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from keras.src.random.seed_generator import global_seed_generator

from tensortap.adapters.rng import preserve_rng_state


@contextmanager
def preserved(model: Any) -> Iterator[Callable[[], None]]:
    """Gives a function that puts variables and random states back; calls it at the end."""
    variables = {id(v): v for v in (*model.variables, global_seed_generator().state)}
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
