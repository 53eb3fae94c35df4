"""What is kept of a tensor, and what `keep=` accepts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import tensortap as tt
from tensortap.errors import ProbeError
from tensortap.reduce.reducers import (
    Custom,
    Histogram,
    Stats,
    as_reducers,
    full,
    histogram,
    quantiles,
    rows,
    sample,
    sample_indices,
    stats,
)


def test_sample_positions_depend_on_seed_place_and_shape_alone() -> None:
    """The same seed, site and shape give the same positions; another of each gives others."""
    one = sample_indices(16, 0, "fc:output", (30, 40))
    assert np.array_equal(one, sample_indices(16, 0, "fc:output", (30, 40)))
    for other in ((1, "fc:output", (30, 40)), (0, "fc:input", (30, 40)), (0, "fc:output", (40, 30))):
        assert not np.array_equal(one, sample_indices(16, *other))


def test_sample_positions_are_the_same_in_every_process() -> None:
    """Another process, with another hash seed, takes the same positions: runs can be compared."""
    code = "from tensortap.reduce.reducers import sample_indices as s; print(s(8, 3, 'a:output', (100, 7)).tolist())"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "5"},
    ).stdout
    assert printed.strip() == str(sample_indices(8, 3, "a:output", (100, 7)).tolist())
    assert sample_indices(8, 3, "a:output", (100, 7)).tolist() == [36, 186, 208, 375, 548, 556, 569, 627]


def test_sampling_leaves_every_global_generator_alone() -> None:
    """Neither Python's, NumPy's nor torch's global generator moves."""
    np.random.seed(0)
    random.seed(0)
    torch.manual_seed(0)
    before = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    sample(100, seed=9).pick(np.arange(10_000.0), "somewhere new")
    assert before == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


@pytest.mark.parametrize(("n", "shape"), [(5, (100,)), (64, (8, 9)), (72, (8, 9)), (500, (8, 9)), (3, ()), (3, (0, 4))])
def test_a_sample_has_distinct_elements(n: int, shape: tuple[int, ...]) -> None:
    """A sample takes each position at most once, and everything when there is no more than it wants."""
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    picked = sample(n).pick(array, "a")
    assert picked.shape == (min(n, array.size),) and len(set(picked.tolist())) == picked.size
    assert set(picked.tolist()) <= set(array.ravel().tolist())
    assert picked.size == 0 or not np.shares_memory(picked, array)


def test_rows_of_a_short_batch() -> None:
    """Rows that a smaller batch lacks are left out; a batch with none of them keeps nothing."""
    array = np.arange(6.0).reshape(3, 2)
    assert rows([0, 2, 7, -1]).pick(array, "a").tolist() == [[0, 1], [4, 5], [4, 5]]
    assert rows([5]).pick(array, "a") is None
    assert rows([0]).pick(np.array(1.0), "a") is None


def test_full_is_a_copy() -> None:
    """Later changes in place do not reach what was kept, and any layout is kept by value."""
    array = np.arange(6.0).reshape(2, 3)
    kept = full().pick(array.T, "a")
    array += 1
    assert kept.tolist() == [[0, 3], [1, 4], [2, 5]] and kept.flags.c_contiguous


def test_what_keep_accepts() -> None:
    """One reducer, several, functions among them, or nothing, which means statistics and histogram."""
    assert as_reducers(None) == (Stats(), Histogram())
    assert as_reducers(stats()) == (Stats(),)
    kept = as_reducers([histogram(), len, lambda x: 1])
    assert [r.name for r in kept if isinstance(r, Custom)] == ["len", "<lambda>"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sample(0), r"sample\(256\)"),
        (lambda: quantiles(1.5), r"between 0 and 1, got \[1.5\]"),
        (lambda: quantiles(), "none"),
        (lambda: rows([]), r"rows\(\[0, 2\]\)"),
        (lambda: rows(3), r"rows\(\[0, 2\]\)"),  # type: ignore[arg-type]
        (lambda: as_reducers(full), r"call it: keep=full\(\)"),
        (lambda: as_reducers("stats"), "keep= must be stats.*, got 'stats'"),
    ],
)
def test_mistakes_are_named_with_the_corrected_call(make: object, text: str) -> None:
    """A reducer that cannot be meant is an error at set-up that shows what to write."""
    with pytest.raises(ProbeError, match=text):
        make()  # type: ignore[operator]


def test_reducers_are_described_as_plain_data() -> None:
    """What `run.json` says of reducers is JSON with a kind and the arguments, functions by their names."""
    kept = tt.probe("a", keep=[tt.quantiles(0.5), tt.sample(4), tt.rows([0, 2]), tt.full(), abs]).describe()["reducers"]
    assert json.loads(json.dumps(kept)) == [
        {"kind": "quantiles", "at": [0.5]},
        {"kind": "sample", "n": 4, "seed": 0},
        {"kind": "rows", "indices": [0, 2]},
        {"kind": "full"},
        {"kind": "custom", "name": "abs"},
    ]
