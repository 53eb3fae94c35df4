"""A snapshot of a run does not change while the run does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensortap as tt
from tensortap.store import facts, queries
from tensortap.store.run import Run, open_run
from tensortap.store.snapshot import Snapshot
from tensortap.store.tensor_index import kept_tensors


@pytest.fixture
def tap(tmp_path: Path) -> Iterator[tt.Tap]:
    """A tap that is still open, with three steps."""
    with tt.watch(tt.probe("**", keep=[tt.stats(), tt.full()]), to=tmp_path / "run") as opened:
        grow(opened, 3)
        yield opened


def grow(tap: tt.Tap, steps: int) -> None:
    for _ in range(steps):
        tt.tap(np.arange(4.0), f"x{tap.run.last_step + 1}")
        tap.step(loss=1.0)


def content(snapshot: Snapshot) -> tuple[object, ...]:
    """All that a snapshot gives."""
    return (
        snapshot.version, snapshot.steps.tolist(), snapshot.places, snapshot.record_count, facts.last_step(snapshot),
        queries.table(snapshot).to_pylist(), queries.metrics(snapshot).to_pylist(),
        [kept.key for kept in kept_tensors(snapshot)],
    )  # fmt: skip


def test_a_snapshot_does_not_grow_with_its_run(tap: tt.Tap) -> None:
    """Steps, rows, metrics and tensors are those of the moment at which it was taken."""
    run = tap.run
    before, other = run.snapshots.take(), run.snapshots.take()
    known = content(before)
    assert before.version == other.version
    grow(tap, 2)
    assert content(before) == known
    assert queries.table(other).num_rows == 3  # its tails had not been read yet: no further than they were long
    assert run.steps == [0, 1, 2, 3, 4]


def test_nothing_changed_nothing_is_read_again(tap: tt.Tap) -> None:
    """With an age allowed, the same snapshot is given as long as its version is the same."""
    run = tap.run
    first = run.snapshots.take(max_age=1e-9)
    assert run.snapshots.take(max_age=1e-9) is first
    grow(tap, 1)
    assert run.snapshots.take(max_age=1e-9) is not first


def test_a_file_that_is_gone_is_looked_for_in_another_snapshot(tap: tt.Tap) -> None:
    """A tail that was sealed and removed after the snapshot was taken is found as a segment."""
    run, taken = open_run(str(tap.path)), []

    def ask(snapshot: Snapshot) -> int:
        taken.append(snapshot)
        if len(taken) == 1:
            tap.close()  # seals the tails that the first snapshot lists
        return int(queries.table(snapshot).num_rows)

    assert run.snapshots.read(ask) == 3 and len(taken) == 2


def test_an_answer_in_several_parts_is_of_one_moment(tap: tt.Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    """`merged` reads rows, places and copies from one snapshot, however the run grows in between."""
    run, original = tap.run, queries.table

    def growing(*given: object, **more: object) -> object:
        grow(tap, 1)
        return original(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("tensortap.store.queries.table", growing)
    assert run.merged("steps").num_rows == 3


def test_run_has_few_methods() -> None:
    """Querying, tensors and facts are jobs of their own; the class only names them."""
    own = [name for name, value in vars(Run).items() if callable(value) or isinstance(value, property)]
    assert len(own) < 20
