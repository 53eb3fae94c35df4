"""Runs of named values, held against each other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import PatternError, RunError

X = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
FULL = [tt.histogram(), tt.full()]


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., str]:
    """A function that records steps of named arrays and gives the run's path."""
    count = iter(range(100))

    def make(*steps, keep=None):
        path = str(tmp_path / f"run{next(count)}")
        with tt.watch(tt.probe("**", keep=keep), to=path) as tap:
            for step in steps:
                for name, value in step.items():
                    for array in value if isinstance(value, list) else [value]:
                        tt.tap(array, name)
                tap.step()
        return path

    return make


def test_identical(record):
    """Two identical runs are equal, bit for bit."""
    steps = [{"a": X, "b": X * 2}] * 3
    found = tt.diff(record(*steps, keep=FULL), record(*steps, keep=FULL))
    assert found and found.first is None and found.first_unequal is None
    assert found.pairs == 6 and len(found) == 2
    assert all(row.worst.bit_equal == 1 and row.worst.sqnr == math.inf for row in found)
    assert "bit for bit" in found.headline


@pytest.mark.parametrize("keep", [None, FULL, tt.sample(40), tt.rows([0, 3])])
def test_first(record, keep):
    """The first divergence is the earliest in the earliest step; rows come the worst first."""
    good = {"a": X, "b": X, "c": X}
    bad = {"a": X, "b": X * 1.01, "c": X * 2}
    found = tt.diff(record(good, good, good, keep=keep), record(good, bad, bad, keep=keep))
    assert not found
    assert (found.first.site, found.first.step) == ("b:output", 1)
    assert [row.site for row in found] == ["c:output", "b:output", "a:output"]
    assert (found[0].differing, found[0].pairs, found[0].first.step) == (2, 3, 1)
    assert "differs first in b:output at step 1" in found.headline


def test_unequal_within_tolerance(record):
    """A last bit is no divergence, but it is told where it first differs."""
    y = np.nextafter(X, 1, dtype=np.float32)
    found = tt.diff(record({"a": X, "b": X}, keep=FULL), record({"a": X, "b": y}, keep=FULL))
    assert found and found.first_unequal.site == "b:output"
    assert not tt.diff(record({"a": X}, keep=FULL), record({"a": y}, keep=FULL), rtol=0)


@pytest.mark.parametrize("keep", [None, FULL])
def test_tolerance_can_be_given(record, keep):
    """rtol is relative to the scale, atol is not."""
    a, b = record({"a": X}, keep=keep), record({"a": X * 1.001}, keep=keep)
    assert not tt.diff(a, b)
    assert tt.diff(a, b, rtol=1e-3)
    assert not tt.diff(a, b, rtol=1e-4)
    assert tt.diff(a, b, rtol=0, atol=0.01)


@pytest.mark.parametrize("keep", [None, FULL])
def test_the_edge_of_the_tolerance(record, keep):
    """One per cent more than the error is enough, one per cent less is not."""
    a, b = record({"a": X}, keep=keep), record({"a": X * 1.001}, keep=keep)
    error = tt.diff(a, b).first.error
    assert tt.diff(a, b, rtol=1.01 * error) and not tt.diff(a, b, rtol=0.99 * error)


def test_what_the_sample_misses(record):
    """Statistics are of all elements, and find what is not in the sample."""
    y = X.copy()
    y[3, 4] = 50
    found = tt.diff(record({"a": X}, keep=tt.sample(5)), record({"a": y}, keep=tt.sample(5)))
    assert not found and found.first.kept == "sample" and found.first.of != "elements"


@pytest.mark.parametrize("keep", [None, FULL])
def test_nan(record, keep):
    """NaN in both at the same places is equal, in one only it differs."""
    bad = np.where(X > 1, np.nan, X)
    a = record({"a": bad}, keep=keep)
    assert tt.diff(a, record({"a": bad}, keep=keep))
    for one, other in ((a, record({"a": X}, keep=keep)), (record({"a": X}, keep=keep), a)):
        found = tt.diff(one, other)
        assert not found and "NaN in" in found.headline


def test_nan_elsewhere(record):
    """As many NaN at other places differ where elements were kept."""
    one, other = X.copy(), X.copy()
    one[0, 0] = other[1, 1] = np.nan
    found = tt.diff(record({"a": one}, keep=FULL), record({"a": other}, keep=FULL))
    assert not found and "other places: 2" in found.headline


def test_shapes(record):
    """Another number of elements differs; another shape of as many is compared by statistics, and said."""
    found = tt.diff(record({"a": X, "b": X}), record({"a": X[:4], "b": X.T}))
    assert found.first.site == "a:output" and "shape [8,32] in a, [4,32] in b" in found.headline
    assert found.shapes == 1 and found.differing == 1
    assert any("another shape" in remark for remark in found.remarks())


def test_channels_first_and_last(record):
    """A port with its channels last is aligned by order, and compared element by element; one wrong place is found."""
    first = X.reshape(2, 4, 4, 8)
    last = np.moveaxis(first, 1, -1)
    wrong = np.moveaxis(first[:, [1, 0, 2, 3]], 1, -1)  # the same numbers, two channels changed places
    a = record({"conv": first, "act": first * 2}, keep=FULL)
    b = record({"p": last, "q": last * 2}, keep=FULL)
    for found in (tt.diff(a, b), tt.diff(b, a)):
        assert found and found.aligned_by == "order" and found.shapes == 0
        assert [row.worst.bit_equal for row in found] == [1, 1]
        assert any("channels first" in remark for remark in found.remarks())
    found = tt.diff(a, record({"p": last, "q": wrong * 2}, keep=FULL))
    assert not found and (found.first.site, found.first.site_b) == ("act:output", "q:output")
    by_statistics = tt.diff(record({"conv": first}), record({"p": last}))
    assert by_statistics and by_statistics.shapes == 1


def test_dtypes(record):
    """bf16 throughout is a change of precision; in one site of many it is a difference."""
    many = {f"l{i}": X for i in range(8)}
    low = {name: x.astype(ml_dtypes.bfloat16) for name, x in many.items()}
    a = record(many, keep=FULL)
    found = tt.diff(a, record(low, keep=FULL))
    assert found and len(found.dtypes["float32", "bfloat16"]) == 8
    found = tt.diff(a, record(many | {"l3": low["l3"]}, keep=FULL))
    assert found.first.site == "l3:output" and found.dtypes == {("float32", "bfloat16"): ("l3:output",)}


def test_missing_sites(record):
    """Sites of one run only are listed, and do not make the rest differ."""
    found = tt.diff(record({"a": X, "b": X, "old": X}), record({"a": X, "b": X, "new": X}))
    assert found and (found.only_in_a, found.only_in_b) == (("old:output",), ("new:output",))
    assert "only in b: 1 site: new:output" in str(found)


def test_steps(record):
    """Of runs with other numbers of steps the common ones are compared."""
    one = {"a": X}
    found = tt.diff(record(one, one, one), record(one))
    assert found and (found.steps, found.steps_only_in_a, found.steps_only_in_b) == ((0,), (1, 2), ())


def test_calls(record):
    """Calls are compared one by one; one that the other run lacks is counted."""
    found = tt.diff(record({"a": [X, X, X]}), record({"a": [X, X * 2]}))
    assert (found.first.call, found.alone_in_a, found.alone_in_b) == (1, 1, 0)
    assert "a:output call 1" in found.headline


def test_ranks(make_run):
    """Ranks are compared with their like."""
    for name, last in (("one", X), ("two", X * 3)):
        make_run([({"a": X}, {})], name=name)
        path = make_run([({"a": last}, {})], name=name, rank=1)
    found = tt.diff(path.replace("two", "one"), path)
    assert found.pairs == 2 and found.first.rank == 1


def test_map(record):
    """Renamed sites are found through a map, samples at other places as well."""
    big = np.random.default_rng(1).normal(size=(40, 50))
    a = record({"h.0.mlp": big, "h.1.mlp": big}, keep=tt.sample(500))
    b = record({"blocks.0.ffn": big, "blocks.1.ffn": big + 1}, keep=tt.sample(500))
    found = tt.diff(a, b, map={"h.*.mlp": "blocks.*.ffn"})
    assert (found.first.site, found.first.site_b) == ("h.1.mlp:output", "blocks.1.ffn:output")
    assert 50 < found[1].worst.elements < 500 and found[1].worst.bit_equal == 1
    assert "h.1.mlp:output → blocks.1.ffn:output" in found.headline


def test_samples_of_other_sizes(record):
    """A sample is compared with a larger sample, with rows and with the whole, where they overlap."""
    big = np.random.default_rng(1).normal(size=(40, 50))
    a = record({"a": big}, keep=tt.sample(100))
    for keep, kind, count in (
        (tt.sample(300), "sample", 100),
        (tt.full(), "sample", 100),
        (tt.rows([1, -2]), "sample", None),
    ):
        worst = tt.diff(a, record({"a": big}, keep=keep))[0].worst
        assert worst.kept == kind and worst.bit_equal == 1
        assert worst.elements == count or count is None
    worst = tt.diff(record({"a": big}, keep=tt.full()), record({"a": big}, keep=tt.rows([1, -2])))[0].worst
    assert (worst.kept, worst.elements) == ("rows", 100)


def test_other_seeds(record):
    """Samples at other places are not held against each other as if they were at the same."""
    a, b = record({"a": X}, keep=tt.sample(20)), record({"a": X}, keep=tt.sample(20, seed=1))
    assert tt.diff(a, b)


def test_order(record):
    """Where names mean nothing, order and shape do."""
    a = record({"a": X, "b": X[:, :4], "c": X})
    found = tt.diff(a, record({"p": X, "q": X[:, :4], "r": X * 2}))
    assert found.aligned_by == "order" and found.first.site_b == "r:output"
    assert any("order of execution" in remark for remark in found.remarks())


def test_chosen(record):
    """Sites and steps limit what is compared."""
    a, b = record({"a": X, "b": X}, {"a": X, "b": X}), record({"a": X, "b": X}, {"a": X, "b": X * 2})
    assert tt.diff(a, b, sites="a") and tt.diff(a, b, steps=0)
    assert len(tt.diff(a, b, sites="b")) == 1
    assert not tt.diff(a, b, sites="b", steps=(1, 2))


def test_table_and_dict(record):
    """Every pair is a row of a table; the dict is strict JSON."""
    found = tt.diff(record({"a": X}, {"a": X}, keep=FULL), record({"a": X}, {"a": X[:3]}, keep=FULL))
    table = found.table()
    assert table["step"].to_pylist() == [0, 1] and table["of"].to_pylist()[1] == "shape"
    assert table["shape_b"].to_pylist() == [[8, 32], [3, 32]]
    said = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert said["same"] is False and said["first"]["step"] == 1 and said["rows"][0]["differing"] == 1


def test_batches_of_steps(record, monkeypatch):
    """However few steps are read at a time, the result is the same."""
    a, b = record(*[{"a": X * n, "b": X} for n in range(5)]), record(*[{"a": X * n, "b": X + n} for n in range(5)])
    whole = tt.diff(a, b).table()
    monkeypatch.setattr(import_module("tensortap.diff.runs"), "_ROWS_AT_ONCE", 4)
    assert tt.diff(a, b).table() == whole


def test_errors(record, tmp_path):
    """What cannot be compared is an error that says why."""
    a = record({"a": X})
    with pytest.raises(RunError, match="no step in common"):
        tt.diff(a, record({"a": X}, {"a": X}), steps=1)
    with pytest.raises(RunError, match="no records"):
        tt.diff(a, record())
    with pytest.raises(RunError, match="OLD=NEW"):
        tt.diff(a, record({"z": X[:3]}))
    with pytest.raises(PatternError, match="'a:output'"):
        tt.diff(a, a, sites="a:outptu")
    with pytest.raises(RunError, match="nowhere"):
        tt.diff(a, tmp_path / "nowhere")


def test_steps_are_paired_by_phase(tmp_path):
    """Two runs that evaluate at other times are compared training step with training step."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.0))
    for name, phases in (("a", "ttet"), ("b", "tett")):
        seen = {"t": 0, "e": 0}
        with tt.watch(model, tt.probe("**:output", keep=tt.stats()), to=tmp_path / name) as tap:
            for phase in phases:
                seen[phase] += 1
                model.train(phase == "t")
                x = torch.full((2, 3), float(seen[phase]) if phase == "t" else -100.0)
                with torch.set_grad_enabled(phase == "t"):
                    model(x)
                tap.step()
    found = tt.diff(tmp_path / "a", tmp_path / "b")
    pairs = zip(found.table()["step"].to_pylist(), found.table()["step_b"].to_pylist(), strict=True)
    assert found and sorted(set(pairs)) == [(0, 0), (1, 2), (2, 1), (3, 3)]
    assert any("paired by phase" in remark for remark in found.remarks())
