"""Steps that are equal in both runs are not gone through pair by pair, and nobody can tell from the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from tensortap.diff import runs
from tensortap.diff.equal_steps import EqualSteps
from tensortap.diff.result import Diff, EqualPairs
from tensortap.reduce.reducers import full, histogram
from tensortap.store.compact import compact

MakeRun = Callable[..., str]
STEPS = 12


def steps(changed: int = -1, late: int = STEPS) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Steps of two sites, and of a third one from `late` on; at `changed` one value differs."""
    made = []
    for number in range(STEPS):
        rng = np.random.default_rng(number)
        tensors = {name: rng.normal(size=8).astype(np.float32) for name in ("a", "b")}
        if number >= late:
            tensors["c"] = rng.normal(size=4)
        if number == changed:
            tensors["b"][3] += 1
        made.append((tensors, {"loss": 1.0}))
    return made


def skipped(found: Diff) -> int:
    return sum(len(batch) for batch in found.batches if isinstance(batch, EqualPairs))


@pytest.mark.parametrize(("changed", "late"), [(-1, STEPS), (-1, 5), (7, STEPS), (0, 5), (STEPS - 1, 3)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_result_is_that_of_comparing_every_pair(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, changed: int, late: int, ranks: int
) -> None:
    """Worst and first pairs, counts, verdict and every row of the table agree; compacted files or not."""
    for rank in range(ranks):
        a = make_run(steps(late=late), name="a", keep=[histogram()], rank=rank)
        b = make_run(steps(changed if rank == ranks - 1 else -1, late), name="b", keep=[histogram()], rank=rank)
    found = tt.diff(a, b)
    same = tt.diff(a, a)
    monkeypatch.setattr(runs, "equal_steps", lambda *_: EqualSteps([], ()))
    wanted = tt.diff(a, b)
    assert found.to_dict() == wanted.to_dict() and str(found) == str(wanted)
    assert found.table().equals(wanted.table()) or str(found.table().to_pydict()) == str(wanted.table().to_pydict())
    assert [row.to_dict() for row in found.rows] == [row.to_dict() for row in wanted.rows]
    assert bool(found) == (changed < 0)
    assert len(tt.diff(a, a, bitwise=True).table()) == len(same.table())
    if changed < 0 and ranks == 1:
        assert skipped(found) >= 2 * (STEPS - 2)
    assert same and skipped(same) > 0 and skipped(wanted) == 0
    assert same.to_dict() == tt.diff(a, a).to_dict()


def test_steps_with_kept_elements_are_gone_through(make_run: MakeRun) -> None:
    """Statistics may agree where elements do not."""
    values = np.arange(6, dtype=np.float32)
    a = make_run([({"a": values}, {})], name="a", keep=[full()])
    b = make_run([({"a": values[::-1].copy()}, {})], name="b", keep=[full()])
    found = tt.diff(a, b)
    assert not found and skipped(found) == 0


def test_a_compacted_run_equals_the_run_it_was(make_run: MakeRun) -> None:
    """Files that lie otherwise are compared row by row, with the same result."""
    a, b = (make_run(steps(), name=name) for name in ("a", "b"))
    compact(b)
    assert tt.diff(a, b) and len(tt.diff(a, b).table()) == 2 * STEPS
