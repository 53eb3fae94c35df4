"""What the viewer's API says of unusual runs, sites, tensors and two runs."""

import json
import threading

import numpy as np
import pytest
from tests.view.test_api import NAN, RNG, X

import tensortap as tt
from tensortap.record.recorder import Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.select.probes import probe
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.types import Place
from tensortap.view.api import service
from tensortap.view.api.cache import SizedCache
from tensortap.view.api.findings import BackgroundFindings
from tensortap.view.api.query import RequestError
from tensortap.view.api.service import Api
from tensortap.view.api.wire import encoded


def test_a_run_of_nothing_but_nan(make_run, ask):
    """Records without a finite element are +Inf and marked, never taken for missing; every page has an answer."""
    make_run([({"a": NAN, "b": NAN}, {"loss": float("nan")})] * 5)
    answer = ask("/api/heat", stat="std")
    assert np.isposinf(answer.columns["value"]).all() and answer.columns["bad"].all()
    assert answer.header["range"] is None
    assert ask("/api/heat", stat="nonfinite").columns["value"].tolist() == [[4.0] * 5] * 2
    assert ask("/api/metrics").header["nonfinite"] == {"loss": {"first": 0, "count": 5}}
    closely = ask("/api/site", site="a:output")
    assert np.isnan(closely.columns["std"]).all() and closely.columns["nonfinite"].tolist() == [4.0] * 5
    [first, _] = ask("/api/depth", step=2)["sites"]
    assert (first["std"], first["absmax"], first["nonfinite"], first["grad"]) == (None, None, 4, None)
    assert ask("/api/findings", wait=1)["findings"][0]["rule"] == "nonfinite"
    for path in ("/api/run", "/api/cost", "/api/findings"):
        json.loads(encoded(ask(path)), parse_constant=pytest.fail)


def test_an_empty_run(make_run, ask):
    """A run without a record is a state, not an error."""
    make_run([])
    assert ask("/api/runs")["runs"][0]["state"] == "empty"
    assert ask("/api/run")["sites"] == []
    assert ask("/api/heat").columns["value"].shape == (0, 0)
    assert ask("/api/metrics").header["names"] == []
    assert ask("/api/findings", wait=1)["findings"] == []


def test_a_run_that_waits_for_its_first_step_is_live(ask, tmp_path):
    """Empty is what nobody writes any more; before its first step a run is live."""
    with tt.watch(to=tmp_path / "run"):
        assert ask("/api/runs")["runs"][0]["state"] == "live"


def test_a_crashed_run(ask, tmp_path):
    """What a killed process left in its tails is shown, with its state."""
    folder = RunFolder(tmp_path / "run")
    recorder = Recorder([probe("**")])
    for n in range(3):
        recorder.observe(recorder.point(Place("a"), 1), buffer_of(X * n))
        folder.append(recorder.close({"loss": float(n)})[0])
    folder._held.close()  # the lock goes with the process; nothing was sealed
    assert ask("/api/runs")["runs"][0]["state"] == "crashed"
    assert ask("/api/heat", stat="max").columns["value"].tolist() == [[0.0, X.max(), X.max() * 2]]
    assert ask("/api/site", site="a:output").header["record"]["step"] == 2
    assert ask("/api/cost")["seconds"] is None


def test_hostile_names_are_plain_text(make_run, ask):
    """Markup, quotes, newlines and separators in names come back as they went in, and can be asked for."""
    names = ["<script>alert(1)</script>", "a\"b'c", "a\nb", "a&b=c", "../../etc", "モデル", "a:b.c[0]", " "]
    make_run([(dict.fromkeys([Place(n) for n in names], X), {})])
    listed = json.loads(encoded(ask("/api/run")))["sites"]
    assert sorted(site["path"] for site in listed) == sorted(names)
    for site in listed:
        assert ask("/api/site", site=site["site"]).header["site"] == site["site"]


def test_a_site_closely(make_run, ask, tmp_path):
    """Statistics, quantiles and shares by step are those of its records; the last record is there in full."""
    path = make_run([({"a": X * (n + 1), "a.weight:param": X, "b": X}, {}) for n in range(20)])
    answer = ask("/api/site", site="a:output")
    run = open_run(path)
    for name in ("mean", "std", "min", "max", "l2"):
        np.testing.assert_allclose(answer.columns[name], run.series("a:output", name).values, rtol=1e-6)
    for name, q in (("q05", "q0.05"), ("q50", "q0.5"), ("q99", "q0.99")):
        np.testing.assert_allclose(answer.columns[name], run.series("a:output", q).values, rtol=1e-6)
    hist, edges = answer.columns["hist"], answer.columns["edges"]
    assert hist.shape == (20, len(edges) - 1) and hist.shape[1] <= 128
    assert np.all(np.diff(edges) >= 0)
    np.testing.assert_allclose(hist.sum(axis=1), 1, rtol=1e-6)
    for n in (0, 19):
        counts = np.histogram((X * (n + 1)).astype(np.float64), edges)[0] / X.size
        assert np.abs(counts - hist[n]).max() <= 2 / X.size  # buckets are half open towards zero
    assert answer.header["record"]["step"] == 19 and answer.header["record"]["reason"] == "every(1)"
    assert answer.header["siblings"] == ["a.weight:param"]
    coarse = ask("/api/site", site="a:output", width=5)
    np.testing.assert_allclose(coarse.columns["std"][0], run.series("a:output", "std").values[:4].mean(), rtol=1e-6)
    np.testing.assert_allclose(coarse.columns["std.high"][0], run.series("a:output", "std").values[3], rtol=1e-6)
    np.testing.assert_allclose(coarse.columns["hist"].sum(axis=1), 1, rtol=1e-6)


def test_one_of_several_calls(make_run, ask):
    """`call` shows one of them alone."""
    make_run([({"a": [X, X * 5]}, {})])
    assert ask("/api/site", site="a:output").header["calls"] == [0, 1]
    np.testing.assert_allclose(ask("/api/site", site="a:output", call=1).columns["max"], [X.max() * 5])


def test_depth_follows_the_network(make_run, ask):
    """Forward and backward scale by depth, at one step and over all of them; the nearest step is taken."""
    step = {"a": X, "b": X * 2, "b:grad_output": X / 10}
    make_run([({}, {}), (step, {}), ({name: x * 3 for name, x in step.items()}, {})])
    one = ask("/api/depth", step=99)
    assert (one["step"], one["steps"].tolist()) == (2, [1, 2])
    assert [site["site"] for site in one["sites"]] == ["a:output", "b:output"]
    rms = np.sqrt(np.mean((X.astype(np.float64) * 0.3) ** 2))
    assert one["sites"][0]["grad"] is None and one["sites"][1]["grad"] == pytest.approx(rms, rel=1e-6)
    over = ask("/api/depth")
    np.testing.assert_allclose(over.columns["forward"], np.outer([1, 3], [1, 2]) * X.std(dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(over.columns["backward"], [[np.nan, rms / 3], [np.nan, rms]], rtol=1e-5)


def test_kept_tensors(make_run, ask, monkeypatch):
    """A matrix comes as it is, with NaN; a large one shrunk without losing its extremes; an index chooses."""
    big = RNG.normal(size=(700, 900)).astype(np.float32)
    big[650, 3], big[0, 0] = 1e6, np.nan
    deep = RNG.normal(size=(2, 3, 4, 5)).astype(np.float32)
    make_run([({"big": big, "deep": deep, "line": np.arange(5.0)}, {})], keep=tt.full())
    [listed] = ask("/api/site", site="deep:output").header["tensors"]
    assert (listed["step"], listed["keeper"], listed["shape"]) == (0, "full", [2, 3, 4, 5])
    answer = ask("/api/tensor", site="deep:output", step=0, index="1,2")
    np.testing.assert_array_equal(answer.columns["value"], deep[1, 2])
    assert answer.header["maps"] == 3
    whole = ask("/api/tensor", site="big:output", step=0, keeper="full")
    assert whole.columns["value"].shape == (512, 512)
    assert np.nanmax(whole.columns["high"]) == 1e6 and whole.header["nonfinite"]["nan"] == 1
    part = ask("/api/tensor", site="big:output", step=0, y="640:660", x="0:10")
    np.testing.assert_array_equal(part.columns["value"], big[640:660, :10])
    assert ask("/api/tensor", site="line:output", step=0).columns["value"].tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(RequestError, match="not in this tensor") as raised:
        ask("/api/tensor", site="deep:output", step=0, index="9")
    assert raised.value.hint == "its leading axes are 2, 3"
    monkeypatch.setattr("tensortap.view.api.tensor.LARGEST", 100)
    with pytest.raises(RequestError, match=r"must have at most .* elements"):
        ask("/api/tensor", site="big:output", step=0)


def test_two_runs_against_each_other(make_run, ask, tmp_path):
    """The first divergence and a map of how far beyond the tolerance; equal runs are equal."""
    steps = [{"a": X, "b": X} for _ in range(4)]
    make_run([(step, {}) for step in steps], name="runs/one")
    make_run([({**step, "b": X * (1.5 if n > 1 else 1)}, {}) for n, step in enumerate(steps)], name="runs/two")
    found = ask("/api/diff", where="runs", a="one", b="two")
    assert (found["first"]["site"], found["first"]["step"]) == ("b:output", 2)
    assert found["heat"]["sites"] == ["a:output", "b:output"] and found["heat"]["steps"] == [0, 1, 2, 3]
    value = np.array(found["heat"]["value"])
    assert (value[1, 2:] > 0).all() and (value[0] == -6).all() and (value[1, :2] == -6).all()
    assert ask("/api/diff", where="runs", a="one", b="one")["same"]


def test_cost_and_what_was_thinned(ask, tmp_path):
    """A closed run tells what observing cost, by site, and what the budget left out."""
    with tt.watch(to=tmp_path / "run", budget=1e-9) as tap:
        for _ in range(50):
            tt.tap(X, "a")
            tap.step()
        cost = tap.cost
    told = ask("/api/cost")
    assert told["seconds"] >= cost.seconds > 0
    assert [site["site"] for site in told["sites"]] == ["a:output"]
    assert told["thinned"]["thinned_steps"] == open_run(tmp_path / "run").counts["thinned_steps"] > 0


def test_rules_look_at_long_runs_within_bounds(make_run, ask, tmp_path):
    """When only some steps are looked at, the one with NaN is among them."""
    broken = X.copy()
    broken[0, 0] = np.nan
    make_run([({"a": broken if n == 77 else X}, {}) for n in range(300)])
    api = Api(str(tmp_path / "run"))
    checked = BackgroundFindings(api.opened("").run, api.opened("").grids, api._threads.rules, limit=20)
    found = checked.complete(api.opened("").snapshot())
    assert found["steps"]["looked"] < 120 and found["steps"]["of"] == 300
    assert found["findings"][0]["steps"]["first"] == 77
    api.close()


def test_findings_come_when_they_are_ready(make_run):
    """The first answer says that rules are running; a later one has what they found."""
    api = Api(make_run([({"relu": np.zeros_like(X)}, {})] * 5))
    first = api.answer("/api/findings", {})
    api._threads.rules.submit(int).result()  # one thread: what was asked before is done
    found = api.answer("/api/findings", {})
    assert first["running"] and first["findings"] == []
    assert not found["running"] and "all_zero" in {finding["rule"] for finding in found["findings"]}
    api.close()


def test_the_cache_is_bounded_and_computes_once():
    """However many ask at a time one computes; what is used longest ago goes first; an error is not remembered."""
    cache, made, release = SizedCache(100), [], threading.Event()

    def slow():
        made.append(1)
        release.wait(20)
        return "value"

    got = []
    threads = [threading.Thread(target=lambda: got.append(cache.get("k", slow, lambda v: 40))) for _ in range(8)]
    for thread in threads:
        thread.start()
    release.set()
    for thread in threads:
        thread.join()
    assert got == ["value"] * 8 and made == [1]
    for key in ("a", "b", "c"):
        cache.get(key, lambda: key, lambda v: 40)  # noqa: B023
    assert cache.held == 80
    assert cache.get("large", lambda: "not kept", lambda v: 1000) == "not kept" and cache.held == 80
    with pytest.raises(ZeroDivisionError):
        cache.get("bad", lambda: 1 / 0, lambda v: 1)
    assert cache.get("bad", lambda: 2, lambda v: 1) == 2


def test_memory_stays_within_its_bound(bench, tmp_path):
    """Asking for everything of a run that is larger than the cache never remembers more than the bound."""
    bench.build(tmp_path / "run", 100, 3000, folded=False)
    api = Api(str(tmp_path / "run"), memory=3_000_000)
    for stat in ("std", "mean", "zeros", "l2"):
        for width in ("3000", "100", "10"):
            api.encoded("/api/heat", {"stat": stat, "width": width})
            assert api.grids.held <= 2_500_000 and api.answers.held <= 500_000
    assert api.answer("/api/heat", {"stat": "std", "width": "4000"}).columns["value"].shape == (100, 3000)
    api.close()


@pytest.mark.parametrize("path", ["/api/run", "/api/heat", "/api/metrics", "/api/depth", "/api/diff"])
def test_key_and_answer_are_of_one_snapshot(path, tmp_path, monkeypatch):
    """A run that grows between a cache's key and its answer is answered as of the key, and anew the next time."""
    monkeypatch.setattr("tensortap.view.api.service.MAX_AGE", 1e-9)
    with tt.watch(to=tmp_path / "run") as tap:

        def grow():
            tt.tap(X, "a")
            tap.step(loss=1.0)

        grow()
        api = Api(str(tmp_path / "run"))
        request, difference = service.REQUESTS.get(path), service.difference
        if request:
            monkeypatch.setitem(service.REQUESTS, path, lambda *given: (grow(), request(*given))[1])
        else:
            monkeypatch.setattr(service, "difference", lambda *given: (grow(), difference(*given))[1])
        given = {"a": "run", "b": "run"} if path == "/api/diff" else {}
        before = api.opened("").snapshot().version
        first, second = (api.encoded(path, given) for _ in range(2))
        assert before in first.data.decode(errors="replace") and first.data != second.data
        api.close()


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/api/depth", {"step": "9" * 30}),
        ("/api/heat", {"width": "1" + "0" * 40}),
        ("/api/heat", {"rows": f"{2**64}:"}),
        ("/api/site", {"site": "a:output", "call": str(-(2**70))}),
        ("/api/tensor", {"site": "a:output", "step": "9" * 99}),
    ],
)  # fmt: skip
def test_numbers_beyond_64_bits_are_refused(make_run, path, given):
    """A number that no step can have is an error of the request, not of the server."""
    api = Api(make_run([({"a": X}, {})] * 2))
    with pytest.raises(RequestError, match="must be"):
        api.answer(path, given)
    api.close()
