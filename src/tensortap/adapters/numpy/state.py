"""Everything a call of an object can change, kept and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tensortap.adapters.numpy.layers import layers_of
from tensortap.adapters.rng import preserve_rng_state


@contextmanager
def preserved(model: Any) -> Iterator[Callable[[], None]]:
    """Yield a function that restores attributes, arrays and random states, and call it at the end."""
    owners = [found.value for found in layers_of(model).layers if hasattr(found.value, "__dict__")]
    attributes = [(owner.__dict__, dict(owner.__dict__)) for owner in owners]
    lists = [(v, list(v)) for _, kept in attributes for v in kept.values() if isinstance(v, list)]
    arrays = [(found.value, found.value.copy()) for found in layers_of(model).arrays]
    generators = [
        (v.bit_generator, copy.deepcopy(v.bit_generator.state))
        for _, kept in attributes
        for v in kept.values()
        if isinstance(v, np.random.Generator)
    ]
    restore_rng_state = preserve_rng_state()

    def restore() -> None:
        for now, kept in attributes:
            _put_back(now, kept)
        for values, items in lists:
            values[:] = items
        for array, was in arrays:
            if array.flags.writeable:
                array[...] = was
        for generator, state in generators:
            generator.state = copy.deepcopy(state)
        restore_rng_state()

    try:
        yield restore
    finally:
        restore()


def _put_back(now: dict[str, Any], kept: dict[str, Any]) -> None:
    for name in now.keys() - kept.keys():
        del now[name]
    now.update(kept)
