"""The random states that code of every framework may use: Python's own and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np


def preserve_rng_state() -> Callable[[], None]:
    """Save both states; return a function that restores them, as often as it is called."""
    python, numpy = random.getstate(), np.random.get_state()

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return put_back


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seed both generators for the time of a block, and restore their states."""
    put_back = preserve_rng_state()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        put_back()
