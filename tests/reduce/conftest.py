"""The kernel as it was, after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    try:
        from tensortap.reduce import _kernel as kernel
    except ImportError:  # not compiled here
        yield
        return
    level, threads = kernel.level(), kernel.threads()
    yield
    kernel.set_level(level)
    kernel.set_threads(threads)
