"""The random states that every framework's code may draw from: Python's own and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np


def preserve_rng_state() -> Callable[[], None]:
    """Keep both states as they are now; the function given puts them back, as often as it is called."""
    python, numpy = random.getstate(), np.random.get_state()

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return put_back


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Let both states begin with a seed for the time of a block, and put them back."""
    put_back = preserve_rng_state()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        put_back()
