"""The numbers behind the page: every answer against the same thing worked out the long way."""

import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import PatternError
from tensortap.record.recorder import Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.select.probes import probe
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.types import Place
from tensortap.view.api import service
from tensortap.view.api.cache import SizedCache
from tensortap.view.api.findings import BackgroundFindings
from tensortap.view.api.query import RequestError
from tensortap.view.api.service import Api
from tensortap.view.api.wire import encoded

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 32)).astype(np.float32)
NAN = np.full((2, 2), np.nan, np.float32)


@pytest.fixture
def ask(tmp_path):
    """A function that opens a folder and answers one question about it."""
    opened = {}

    def answer(path, where="run", **given):
        if where not in opened:
            opened[where] = Api(str(tmp_path / where))
        return opened[where].answer(path, {name: str(value) for name, value in given.items()})

    yield answer
    for api in opened.values():
        api.close()


def brute(path, stat, port=""):
    """Each site's values by step, all calls and ranks of a step in a list."""
    found = {}
    for record in open_run(path).records():
        if port in ("", record.place.port) and not record.recomputed:
            values = found.setdefault(str(record.place), {})
            values.setdefault(record.step, []).append(stat(record))
    return found


def expected(found, names, edges, fold):
    """The heat map of these values."""
    rows = []
    for name in names:
        cells = []
        for low, high in itertools.pairwise(edges):
            inside = [v for step, values in found.get(name, {}).items() if low <= step < high for v in values]
            inside = [v for v in inside if v == v]
            cells.append(fold(inside) if inside else np.nan)
        rows.append(cells)
    return np.array(rows)


STATS = {
    "std": (lambda r: r["std"], np.mean),
    "mean": (lambda r: r["mean"], np.mean),
    "absmean": (lambda r: abs(r["mean"]), np.mean),
    "zeros": (lambda r: r["zeros"] / r["numel"], np.mean),
    "nonfinite": (lambda r: r["nan"] + r["posinf"] + r["neginf"], np.sum),
    "min": (lambda r: r["min"], np.min),
    "max": (lambda r: r["max"], np.max),
    "l2": (lambda r: r["l2"], np.mean),
    "rms": (lambda r: r["l2"] / np.sqrt(r["numel"] - r["nan"] - r["posinf"] - r["neginf"]), np.mean),
    "numel": (lambda r: r["numel"], np.mean),
    "grad": (lambda r: r["l2"], np.mean),
}


@pytest.fixture
def mixed(make_run, tmp_path):
    """Two ranks; several calls, a site that comes late, one with NaN, gradients, 150 steps with holes."""
    for rank in (0, 1):
        steps = []
        for n in range(150):
            bad = X.copy()
            bad[0, 0] = np.inf if n % 7 == 0 else 1
            tensors = {"a": X * (n + 1 + rank), "b": [X, X * n], "relu": np.maximum(X - n / 50, 0), "c": bad}
            tensors |= {"late": X} if n > 100 else {}
            tensors |= {"w:grad": X * 1e-3} if n % 10 == 0 else {}
            steps.append((tensors if n % 3 else {}, {"loss": 1 / (n + 1)}))
        make_run(steps, launch="one", rank=rank)
    return str(tmp_path / "run")


@pytest.mark.parametrize("width", [1000, 40, 7, 1])
def test_a_heat_map_is_what_the_records_say(mixed, ask, width):
    """At every level of detail each cell is the mean (sum, least, greatest) of its records, its extremes are theirs."""
    sites = open_run(mixed).sites
    for stat, (of, fold) in STATS.items():
        answer = ask("/api/heat", stat=stat, width=width)
        edges, value = answer.columns["step"], answer.columns["value"]
        names = [sites[row] for row in answer.columns["row"]]
        assert names == [name for name in sites if stat != "grad" or name == "w:grad"]
        assert value.shape == (len(names), len(edges) - 1) and value.shape[1] <= width
        found = brute(mixed, of)
        np.testing.assert_allclose(value, expected(found, names, edges, fold), rtol=2e-6, err_msg=stat)
        if "low" in answer.columns:
            np.testing.assert_allclose(answer.columns["low"], expected(found, names, edges, np.min), rtol=1e-6)
            np.testing.assert_allclose(answer.columns["high"], expected(found, names, edges, np.max), rtol=1e-6)


def test_what_was_not_finite_is_marked(mixed, ask):
    """Cells with an infinity in them are marked, whatever the statistic, and no others."""
    answer = ask("/api/heat", stat="std", port="output")
    marks, steps = answer.columns["bad"], answer.columns["step"][:-1]
    c = open_run(mixed).sites.index("c:output")
    assert np.array_equal(marks[answer.columns["row"] == c][0], steps % 7 == 0)
    assert marks.sum() == (steps % 7 == 0).sum() > 0


def test_update_ratios_are_those_of_updates(make_run, ask):
    """`update` shows the ratio that was recorded with an update, and only places that are updates."""

    def ratio(x):
        return float(np.abs(x).max())

    make_run([({"w:update": X * n, "a": X}, {}) for n in range(3)], keep=[tt.stats(), ratio])
    answer = ask("/api/heat", stat="update")
    np.testing.assert_allclose(answer.columns["value"], [np.abs(X).max() * np.arange(3)], rtol=1e-6)
    assert answer.header["total"] == 1 and "update" in ask("/api/run")["stats"]


def test_what_was_recomputed_counts_once(make_run, ask, tmp_path):
    """Activations that a checkpointed layer computes again for its backward are not counted twice."""
    folder, recorder = RunFolder(tmp_path / "run"), Recorder([probe("**")])
    for again in (False, True):
        recorder.observe(recorder.point(Place("a"), 1), buffer_of(NAN), recomputed=again)
    folder.append(recorder.close({})[0])
    folder.close()
    assert ask("/api/heat", stat="nonfinite").columns["value"].tolist() == [[4.0]]


def test_the_first_heat_map_waits_for_no_other_package(mixed):
    """Looking at a run and drawing it imports neither pandas nor a framework."""
    code = f"""
import sys
from tensortap.view import server
from tensortap.view.api.service import Api
api = Api({mixed!r})
api.encoded("/api/heat", {{"stat": "std"}})
print(*sorted({{"pandas", "torch", "tensorflow", "jax"}} & set(sys.modules)))
api.close()
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_zooms_show_the_steps_asked_for(mixed, ask):
    """`from` and `to` are both meant; bins lie where they lie in the whole, and colours mean the same."""
    whole, part = ask("/api/heat", stat="std"), ask("/api/heat", **{"stat": "std", "from": 50, "to": 59})
    assert part.columns["step"].tolist() == [50, 52, 53, 55, 56, 58, 59, 61]
    assert part.header["range"] == whole.header["range"]
    at = np.searchsorted(whole.columns["step"], 50)
    np.testing.assert_array_equal(part.columns["value"], whole.columns["value"][:, at : at + 7])


def test_rows_are_chosen_by_port_pattern_and_number(mixed, ask):
    """What is left is in order of execution, and `total` says how many there were before slicing."""
    sites = ask("/api/run")["sites"]

    def names(**given):
        answer = ask("/api/heat", **given)
        return [sites[row]["site"] for row in answer.columns["row"]], answer.header["total"]

    assert names(port="grad") == (["w:grad"], 1)
    assert names(sites="re*") == (["relu:output"], 1)
    assert names(port="output", rows="1:3") == (["b:output", "relu:output"], 5)
    assert names(rows="90:99") == ([], 6)


def test_rows_are_chosen_by_their_modules_class(make_run, ask):
    """`type:ReLU` finds the outputs of modules of that class; one that is not there offers those that are."""
    modules = [{"path": "a", "type": "Linear"}, {"path": "b", "type": "ReLU"}]
    make_run([({"a": X, "b": X, "b:input": X}, {})], about={"model": {"class": "Net", "modules": modules}})
    assert ask("/api/heat", sites="type:ReLU").columns["row"].tolist() == [1]
    assert ask("/api/heat", sites="type:*:*").header["total"] == 3
    assert [site["type"] for site in ask("/api/run")["sites"]] == ["Linear", "ReLU", "ReLU"]
    with pytest.raises(PatternError, match="Did you mean 'Linear'"):
        ask("/api/heat", sites="type:Linea")


def test_folding_the_files_changes_no_number(bench, tmp_path):
    """As training leaves it and as `compact` leaves it, the answers are the same."""
    bench.build(tmp_path / "run", 60, 900, folded=False)
    before = Api(str(tmp_path / "run"))
    asked = [("/api/heat", {"stat": s, "width": w}) for s in ("std", "zeros") for w in ("5", "100", "2000")]
    asked += [("/api/depth", {"width": "50"}), ("/api/site", {"site": "layers.1.norm:output", "width": "90"})]
    answers = [before.answer(*question).columns for question in asked]
    before.close()
    compact(tmp_path / "run")
    after = Api(str(tmp_path / "run"))
    for question, columns in zip(asked, answers, strict=True):
        again = after.answer(*question).columns
        assert list(again) == list(columns)
        for name in columns:
            np.testing.assert_allclose(again[name], columns[name], rtol=1e-5, err_msg=f"{question} {name}")
    after.close()


def test_files_that_are_folded_away_meanwhile_are_looked_for_anew(bench, tmp_path, monkeypatch):
    """A run compacted between listing and reading its files is answered all the same."""
    monkeypatch.setattr("tensortap.view.api.service.MAX_AGE", 1e9)
    bench.build(tmp_path / "run", 20, 6000, folded=False)
    api = Api(str(tmp_path / "run"))
    listed = api.opened("").snapshot()
    compact(tmp_path / "run")
    assert api.answer("/api/heat", {"stat": "std"}).columns["value"].shape[0] == 20
    assert api.answer("/api/site", {"site": "layers.1.norm:output"}).header["record"]["step"] == 5999
    assert api.opened("").snapshot() is not listed
    api.close()


def test_half_a_million_records_at_every_zoom(bench, tmp_path):
    """Of 500 000 records tiles at two levels are put together, and agree with the finest."""
    bench.build(tmp_path / "run", 250, 2000)
    api = Api(str(tmp_path / "run"))
    fine = api.answer("/api/heat", {"stat": "std", "width": "4000"}).columns["value"]
    assert fine.shape == (250, 2000)
    for width in (300, 40, 3):
        answer = api.answer("/api/heat", {"stat": "std", "width": str(width)})
        size = 1 << answer.header["level"]
        means = [fine[:, a : a + size].mean(axis=1) for a in range(0, 2000, size)]
        np.testing.assert_allclose(answer.columns["value"], np.stack(means, axis=1), rtol=1e-4)
        np.testing.assert_array_equal(answer.columns["high"][:, 0], fine[:, :size].max(axis=1))
    assert api.answer("/api/runs", {})["runs"][0]["records"] == 500_000
    api.close()


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
    with pytest.raises(RequestError, match="too many to read"):
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
    checked = BackgroundFindings(api.opened("").run, api.opened("").grids, api._rules, limit=20)
    found = checked.complete(api.opened("").snapshot())
    assert found["steps"]["looked"] < 120 and found["steps"]["of"] == 300
    assert found["findings"][0]["steps"]["first"] == 77
    api.close()


def test_findings_come_when_they_are_ready(make_run):
    """The first answer says that rules are running; a later one has what they found."""
    api = Api(make_run([({"relu": np.zeros_like(X)}, {})] * 5))
    first = api.answer("/api/findings", {})
    api._rules.submit(int).result()  # one thread: what was asked before is done
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
