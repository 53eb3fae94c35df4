"""The step table: it grows, is used again, parts cleanly, and threads may fill it at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from tensortap.record.cost import Account
from tensortap.record.step import summary_of
from tensortap.record.table import Kept, Names, StepTable, Value
from tensortap.reduce import kernel as kernels
from tensortap.reduce.content_hash import ABSENT
from tensortap.reduce.statistics import EMPTY_ROW, NUMBERS, STATISTICS
from tensortap.reduce.summary import summarize
from tensortap.types import Place

F32 = 1


def put(table: StepTable, x: np.ndarray[Any, Any], key: int = 0, want: int = 1, recomputed: int = 0) -> int:
    return table.record(key, 1, want, recomputed, F32, x.ctypes.data, x.shape, None)


def assert_row(table: StepTable, row: int, x: np.ndarray[Any, Any]) -> None:
    got, expected = summary_of(table, row), summarize(x)
    for name in expected:
        assert np.array_equal(got[name], expected[name], equal_nan=name in STATISTICS), name


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 255, 256, 257, 2000])
def test_it_grows_with_rows_histograms_and_dimensions(rows: int) -> None:
    """However small it began, every row keeps its statistics, histogram and shape."""
    table = StepTable(1, 1, 1, 1)
    rng = np.random.default_rng(rows)
    arrays = [rng.normal(size=(1, i % 5 + 1, 2)).astype(np.float32) for i in range(rows)]
    for i, x in enumerate(arrays):
        assert put(table, x, key=i % 40, want=i % 3 != 0) == i
    for i in {0, rows // 2, rows - 1}:
        assert table.shape(i) == arrays[i].shape
        assert (table.histogram(i) is None) == (i % 3 == 0)
        if i % 3:
            assert_row(table, i, arrays[i])
    assert table.column("seq").tolist() == list(range(rows))
    assert table.column("hist_valid").tolist() == [i % 3 != 0 for i in range(rows)]


def test_it_grows_with_places() -> None:
    """A place with a high number has its calls counted like any other."""
    table = StepTable(4, keys=1)
    x = np.ones(3, np.float32)
    for key in (0, 5000, 5000, 70_000, 0):
        put(table, x, key)
    assert table.column("key").tolist() == [0, 5000, 5000, 70_000, 0]
    assert table.column("call").tolist() == [0, 0, 1, 0, 1]


def test_recomputed_calls_are_counted_apart() -> None:
    """A recomputed call carries the number of the call that it repeats."""
    table = StepTable()
    x = np.ones(3, np.float32)
    for recomputed in (0, 0, 1, 1, 0):
        put(table, x, 3, recomputed=recomputed)
    assert table.column("call").tolist() == [0, 1, 0, 1, 2]
    assert table.column("recomputed").tolist() == [False, False, True, True, False]


def test_reset_forgets_the_rows_and_keeps_the_memory() -> None:
    """A table that is used again shows nothing of its earlier life."""
    table = StepTable(2)
    for _ in range(9):
        put(table, np.array([np.nan], np.float32), recomputed=1)
    table.tensors.append(Kept(0, "full", np.ones(2), 1))
    table.values.append(Value(0, "x", 1.0, 1))
    before = table.generation
    table.reset(time=5)
    assert (table.rows, table.nonfinite, table.tensors, table.values) == (0, 0, [], [])
    x = np.arange(4, dtype=np.float32)
    put(table, x)
    assert_row(table, 0, x)
    assert table.column("recomputed").tolist() == [False] and table.column("call").tolist() == [0]
    assert table.column("time").tolist() == [5] and table.generation == before


def test_rows_that_are_not_finite_are_counted() -> None:
    """Each row with a NaN or an infinity counts once."""
    table = StepTable()
    for values in ([1.0], [np.nan, np.nan], [np.inf], [-np.inf, 1.0], [2.0]):
        put(table, np.array(values, np.float32))
    assert table.nonfinite == 3
    assert table.take(np.array([0, 2, 3])).nonfinite == 2


def test_take_gives_a_table_of_its_own() -> None:
    """Chosen rows come with their histograms, shapes, tensors and numbers, and later changes do not reach them."""
    table = StepTable(2)
    arrays = [np.random.default_rng(i).normal(size=i + 1).astype(np.float32) for i in range(12)]
    for i, x in enumerate(arrays):
        put(table, x, key=i, want=i % 2)
        table.tensors.append(Kept(i, "full", x, 1))
        table.values.append(Value(i, "n", float(i), 1))
    part = table.take(np.array([1, 4, 11]))
    table.reset()
    put(table, np.zeros(7, np.float32))
    assert part.rows == 3 and part.column("key").tolist() == [1, 4, 11]
    assert_row(part, 0, arrays[1])
    assert_row(part, 2, arrays[11])
    assert part.histogram(1) is None and part.shape(1) == (5,)
    assert [(k.row, k.array.size) for k in part.tensors] == [(0, 2), (1, 5), (2, 12)]
    assert [(v.row, v.number) for v in part.values] == [(0, 1.0), (1, 4.0), (2, 11.0)]


def test_rows_computed_elsewhere_are_inserted() -> None:
    """A row from a device stands in the table like one of the kernel's, and makes it grow as well."""
    table = StepTable(1, 1, 1, 1)
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    known = summarize(x)
    row = [*(known[name] for name in NUMBERS), ABSENT]
    for i in range(20):
        assert known.hist_offset is not None
        assert table.insert(i, 1, False, F32, x.shape, row, known.hist_offset, known.hist_counts) == i
    table.insert(0, 1, True, F32, x.shape, row)
    assert_row(table, 19, x)
    assert table.histogram(20) is None and table.rows == 21


def test_a_closed_table_takes_no_row() -> None:
    """After close a late row is refused, and after reset taken again."""
    table = StepTable(4)
    x = np.ones(3, np.float32)
    put(table, x)
    table.close()
    assert put(table, x) == -1
    assert table.insert(0, 1, False, F32, (3,), EMPTY_ROW) == -1
    assert table.rows == 1
    table.reset()
    assert put(table, x) == 0


def test_its_memory_is_counted_whole() -> None:
    """The bytes are those allocated, used or not, and those of kept tensors."""
    table = StepTable(1000)
    assert table.nbytes >= 1000 * 150
    before = table.nbytes
    table.tensors.append(Kept(0, "full", np.zeros(1 << 16), 1))
    assert table.nbytes == before + (1 << 19) and table.tensor_bytes == 1 << 19


def test_threads_fill_one_table() -> None:
    """Rows recorded and inserted by several threads at once all arrive, each whole, while the table grows."""
    table = StepTable(1, 1, 1, 1)
    count, workers = 300, 4
    arrays = [np.full(30_000 + key, key + 1, np.float32) for key in range(workers)]
    barrier = threading.Barrier(workers)
    known = [summarize(x) for x in arrays]

    def work(key: int) -> None:
        barrier.wait()
        row = [*(known[key][name] for name in NUMBERS), ABSENT]
        for i in range(count):
            if i % 10 == 9:
                counts = known[key].hist_counts
                table.insert(key, 1, False, F32, arrays[key].shape, row, known[key].hist_offset or 0, counts)
            else:
                put(table, arrays[key], key)

    threads = [threading.Thread(target=work, args=(key,)) for key in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table.rows == count * workers
    for key in range(workers):
        mine = np.flatnonzero(table.column("key") == key)
        assert sorted(table.column("call")[mine].tolist()) == list(range(count))
    for row in range(0, table.rows, 7):
        assert_row(table, row, arrays[int(table.column("key")[row])])


def test_names_are_numbered_once() -> None:
    """Places, words, reasons and phases keep their numbers, however many follow."""
    names = Names()
    places = [Place(f"layer{i}", "output" if i % 2 else "input", f"[{i % 3}]") for i in range(500)]
    assert [names.key(place) for place in places] == list(range(500))
    assert [names.key(place) for place in reversed(places)] == list(reversed(range(500)))
    assert list(names.words["port"]) == ["input", "output"]
    assert names.phase("eval") == 2 and names.phase("test") == 3 and names.phase("test") == 3
    table = StepTable()
    put(table, np.ones(1, np.float32), key=499)
    names.fill(table)
    words = [list(names.words[field])[int(table.columns[field][0])] for field in Names.FIELDS]
    assert Place(*words) == places[499]


@pytest.mark.parametrize("way", ["c", "numpy"])
def test_rows_are_numbered_and_compared_with_the_last_step(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settling says whether a step has the rows of the one before, also after the table has grown."""
    if way == "numpy":
        monkeypatch.setattr(kernels, "settle", None)
    table, x = StepTable(2, keys=1), np.ones(3, np.float32)
    answers = []
    for number, keys in enumerate([[0, 1], [0, 1], [1, 0], [1, 0, 2], [1, 0, 2], [1, 0], []]):
        table.reset()
        for key in keys:
            put(table, x, key)
        answers.append(table.settle(number))
        assert table.column("step").tolist() == [number] * len(keys)
    assert answers == [False, True, False, False, True, False, False]
    for recomputed in (0, 1, 1, 0):
        table.reset()
        put(table, x, recomputed=0)
        put(table, x, recomputed=recomputed)
        answers.append(table.settle(9))
    assert answers[-4:] == [False, False, True, False]


@pytest.mark.parametrize("way", ["c", "numpy"])
def test_costs_are_added_up_by_place(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row costs what the kernel noted, whatever number its place has."""
    if way == "numpy":
        monkeypatch.setattr(kernels, "charge", None)
    names, account, table, x = Names(), Account(), StepTable(), np.ones(3, np.float32)
    places = [Place(f"site.{i}") for i in range(300)]
    for place in places:
        names.key(place)
    for key in (0, 299, 299):
        put(table, x, key)
    table.columns["cost"][:3] = 1_000_000, 2_000_000, 3_000_000
    account.take(table)
    account.take(StepTable())
    cost = account.report(names)
    assert cost.by_site == pytest.approx({"site.0:output": 0.001, "site.299:output": 0.005}, rel=1e-9)
    assert cost.seconds == pytest.approx(0.006, rel=1e-9)


@pytest.mark.parametrize("opened_before", [0.0, 0.05])
def test_rows_have_the_time_of_the_wall_clock(opened_before: float) -> None:
    """Without a fixed time each row has the wall clock's, however long ago its step was opened."""
    table = StepTable()
    table.reset()
    time.sleep(opened_before)
    before = time.time()
    put(table, np.ones(3, np.float32))
    after = time.time()
    (noted,) = table.column("time").tolist()
    assert before - 0.01 <= noted / 1e6 <= after + 0.01
