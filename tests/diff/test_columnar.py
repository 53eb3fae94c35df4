"""Runs are compared by columns, and nobody can tell from the result: it is that of comparing pair by pair."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

import tensortap as tt
from tensortap.diff import columnar, row_pairs
from tensortap.diff.builder import DiffBuilder
from tensortap.diff.columns import _one_by_one, _statistics, histograms_that_differ
from tensortap.record.recorder import Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.types import Place

MakeRun = Callable[..., str]
STEPS = 6
TYPES: tuple[Any, ...] = (np.float32, np.float64, ml_dtypes.bfloat16, np.int64, np.bool_, np.float16)


def recorded(path: Path, seed: int, *, keep: Any, ranks: int, changes: int, other_types: bool = False) -> str:
    """Record a run of several places, types, calls and ranks; another seed changes some of its values and rows."""
    fixed, own = random.Random(0), random.Random(seed)
    places = [Place(f"m{i}", ("output", "param", "grad_output")[i % 3]) for i in range(7)]
    for rank in range(ranks):
        recorder = Recorder([tt.probe("**", keep=keep)], rank=rank, clock=lambda: 1e9)
        folder = RunFolder(path, rank=rank, launch="test")
        for number in range(STEPS):
            rng = np.random.default_rng([number, rank])
            for i, place in enumerate(places):
                kind = fixed.choice(TYPES) if i % 2 else np.float32
                for _ in range(1 + (i == 3)):
                    values = _changed(rng.normal(size=(4, 3)) * 5, own, changes)
                    if changes and own.randrange(60) == 0:
                        continue
                    if other_types and i == 2:
                        kind = np.float64
                    with np.errstate(invalid="ignore"):
                        array = values.astype(kind)
                    recorder.observe(recorder.point(place, 1), buffer_of(array), array)
            for step in recorder.close({"loss": 1.0}):
                folder.append(step)
        folder.tick()
        folder.close()
    return str(path)


def _changed(values: Any, rng: random.Random, changes: int) -> Any:
    if changes and rng.randrange(changes) == 0:
        values = values.copy()
        values.flat[rng.randrange(values.size)] = rng.choice((1e-7, 3.0, np.inf, np.nan, 0.0))
        return values if rng.randrange(8) else values[:2]
    return values * (1 + 1e-9) if changes and rng.randrange(3) == 0 else values


@pytest.fixture
def pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function from whose call on every pair is added as a record."""

    def put(self: DiffBuilder, found: Any, load: Callable[[], Iterator[Any]]) -> None:
        for pairs in load():
            self.add(pairs, 0, 0)
        self._alone = list(found.alone)

    return lambda: monkeypatch.setattr(DiffBuilder, "put", put)


@pytest.mark.parametrize(
    ("keep", "ranks", "changes"),
    [
        pytest.param([tt.histogram()], 1, 0, marks=pytest.mark.thorough),
        pytest.param([tt.histogram(), tt.sample(3)], 1, 4, marks=pytest.mark.thorough),
        ([tt.histogram()], 2, 200),
        pytest.param([tt.stats(), tt.hash()], 3, 1, marks=pytest.mark.thorough),
    ],
)
def test_the_result_is_that_of_comparing_every_pair(
    tmp_path: Path, pair_by_pair: Callable[[], None], monkeypatch: pytest.MonkeyPatch, keep: Any, ranks: int,
    changes: int,
) -> None:  # fmt: skip
    """Worst and first pairs, cause, counts, verdict and text agree; in small chunks, compacted or not, bit for bit."""
    monkeypatch.setattr(row_pairs, "_ROWS_AT_ONCE", 20)
    a = recorded(tmp_path / "a", 1, keep=keep, ranks=ranks, changes=0)
    b = recorded(tmp_path / "b", 2, keep=keep, ranks=ranks, changes=changes, other_types=ranks == 3)
    ways: list[dict[str, Any]] = [{}, {"bitwise": True}, {"rtol": 1e-9}, {"steps": [1, 2, 5]}, {"sites": "m3"}]
    found = [tt.diff(a, b, **way) for way in ways]
    compact(b)
    found += [tt.diff(a, b), tt.diff(b, a)]
    pair_by_pair()
    wanted = [*(tt.diff(a, b, **way) for way in [*ways, {}]), tt.diff(b, a)]
    for one, other in zip(found, wanted, strict=True):
        assert one.to_dict() == other.to_dict() and str(one) == str(other)
        assert [row.to_dict() for row in one.rows] == [row.to_dict() for row in other.rows]
        assert [row.first is one.first for row in one.rows] == [row.first is other.first for row in other.rows]
        table, columns = one.table(), one.excess
        rows = zip(table["site"].to_pylist(), table["step"].to_pylist(), table["excess"].to_pylist(), strict=True)
        names = [columns.sites[i] for i in columns.site]
        assert sorted(rows) == sorted(zip(names, columns.step.tolist(), columns.excess.tolist(), strict=True))
    assert bool(found[0]) == (changes == 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_columns_held_of_a_pair_is_what_its_records_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:  # fmt: skip
    """Where histograms are not read for every site, all else of its pairs is the same."""
    keep = [tt.histogram(), tt.hash(), tt.sample(3)]
    a = recorded(tmp_path / "a", 1, keep=keep, ranks=ranks, changes=0)
    b = recorded(tmp_path / "b", 2, keep=keep, ranks=ranks, changes=3, other_types=True)
    wanted = tt.diff(a, b)
    monkeypatch.setattr(columnar, "HISTOGRAM_ROWS", -1)
    found = tt.diff(a, b)
    assert len(found.rows) == 7 and str(found) == str(wanted)
    distances = {"tv": None, "ks": None}
    assert [row.to_dict() | distances for row in found.rows] == [row.to_dict() | distances for row in wanted.rows]
    assert {**found.to_dict(), "rows": ()} == {**wanted.to_dict(), "rows": ()}


def test_statistics_of_one_scale_may_be_compared_at_once() -> None:
    """As much beyond the tolerance, and unequal, as one statistic after the other says, whatever the values are."""
    rng = np.random.default_rng(0)
    odd = (0.0, np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324)
    sides = []
    for _ in range(2):
        side = {name: rng.choice((rng.normal(), 1.5, *odd), 4000) for name in ("mean", "std", "l1", "l2", "min", "max")}
        side |= {name: rng.choice((0, 0, 0, 9), 4000) for name in ("nan", "posinf", "neginf")}
        sides.append({**side, "numel": np.full(4000, 9)})
    for atol in (0.0, 1e-3):
        with np.errstate(all="ignore"):
            rtol = rng.choice((0.0, 1e-3), 4000)
            found, wanted = _statistics(*sides, rtol, atol), _one_by_one(*sides, rtol, atol)
        np.testing.assert_array_equal(found[1], wanted[1])
        np.testing.assert_array_equal(found[0] != 0, wanted[0] != 0)


def test_records_without_a_partner_are_counted(make_run: MakeRun) -> None:
    """A call more, a step less: the counts say so."""
    values = np.arange(6.0)
    a = make_run([({"a": values, "b": values}, {}), ({"a": values}, {})], name="a")
    b = make_run([({"a": values}, {}), ({"a": values, "b": values}, {}), ({"a": values}, {})], name="b")
    found = tt.diff(a, b)
    assert (found.alone_in_a, found.alone_in_b, found.steps_only_in_b) == (1, 1, (2,))


def test_a_run_is_the_same_as_itself(make_run: MakeRun) -> None:
    """Each file is read once; nothing differs, by tolerance and by bits."""
    steps = [({"a": np.full(8, np.nan), "b": np.arange(8.0) + i}, {}) for i in range(12)]
    path = make_run(steps, keep=[tt.histogram()])
    assert tt.diff(path, path).pairs == 24 and tt.diff(path, path, bitwise=True)


def test_statistics_may_agree_where_elements_do_not(make_run: MakeRun) -> None:
    """Elements that both kept are compared one by one."""
    values = np.arange(6, dtype=np.float32)
    a = make_run([({"a": values}, {})], name="a", keep=[tt.full()])
    b = make_run([({"a": values[::-1].copy()}, {})], name="b", keep=[tt.full()])
    assert not tt.diff(a, b)


def test_histograms_alone_make_runs_unequal(make_run: MakeRun, pair_by_pair: Callable[[], None]) -> None:
    """Where every statistic agrees, the buckets tell; the runs agree within the tolerance all the same."""
    x = np.array([-3.0, 3.0, 1.0, -1.0, 2.0, -2.0, 0.0, 0.0])
    y = np.array([-3.0, 3.0, np.sqrt(2.5), -np.sqrt(2.5), np.sqrt(2.5), -np.sqrt(2.5), 0.0, 0.0])
    steps = [({"a": x}, {}), ({"a": x}, {})]
    a, b = make_run(steps, name="a", keep=[tt.histogram()]), make_run([steps[0], ({"a": y}, {})], name="b",
                                                                      keep=[tt.histogram()])  # fmt: skip
    found = tt.diff(a, b, rtol=1)
    assert found.first_unequal is not None and found.first_unequal.step == 1
    pair_by_pair()
    assert found.to_dict() == tt.diff(a, b, rtol=1).to_dict()


def test_empty_buckets_at_the_ends_are_no_difference() -> None:
    """Only what is in buckets counts, wherever the list of them begins; a missing list is not compared."""
    a = pa.array([[0, 1, 2], [5], [1, 2], [0, 0], None, [3]])
    b = pa.array([[1, 2, 0], [5], [1, 3], [], [1], [3]])
    first, second = np.array([4, 0, 0, 7, 0, 1]), np.array([5, 0, 0, 0, 0, 2])
    assert histograms_that_differ(first, a, second, b).tolist() == [False, False, True, False, False, True]
