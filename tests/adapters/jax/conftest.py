"""Small models of every library, with the same numbers in them, and a memory to watch into."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tt

pytest.importorskip("jax")
import tensortap.adapters.jax.adapter


@pytest.fixture
def memory():
    return tt.Memory()


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


@pytest.fixture
def seen(memory):
    """What was recorded: place, with the number of the call behind it, to record."""

    def records():
        return {f"{r.place}" + (f"#{r.call}" if r.call else ""): r for r in memory.records if not r.recomputed}

    return records
