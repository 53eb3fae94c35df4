"""The numbers behind the page: every answer against the same thing worked out the long way."""

import itertools
import subprocess
import sys
from pathlib import Path

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
from tensortap.view.api.service import Api

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 32)).astype(np.float32)
NAN = np.full((2, 2), np.nan, np.float32)


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


@pytest.mark.parametrize("width", [40, 7, *(pytest.param(w, marks=pytest.mark.thorough) for w in (1000, 1))])
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


def test_the_description_of_a_run_waits_for_no_other_package(tmp_path):
    """Describing a run without events, also a site that its last steps lack, does not import pandas."""
    with tt.watch(to=tmp_path / "run") as tap:
        for step in range(3):
            tt.tap(np.ones((2, 3), np.float32), "every")
            if step == 0:
                tt.tap(np.ones(4), "once")
            tap.step(loss=1.0)
    code = f"""
import json, sys
from tensortap.view.api.service import Api
api = Api({str(tmp_path / "run")!r})
said = json.loads(api.encoded("/api/run", {{}}).data)
api.encoded("/api/timeline", {{}})
print([[site["path"], site["dtype"], site["shape"]] for site in said["sites"]], "pandas" in sys.modules)
api.close()
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[['every', 'float32', [2, 3]], ['once', 'float64', [4]]] False\n"


def test_the_first_comparison_waits_for_no_other_package(mixed):
    """Comparing two runs, also where histograms are not read for every site, does not import pandas."""
    folder, run = str(Path(mixed).parent), Path(mixed).name
    code = f"""
import sys
from tensortap.diff import columnar
from tensortap.view.api.service import Api
columnar.HISTOGRAM_ROWS = -1
api = Api({folder!r})
api.encoded("/api/diff", {{"a": {run!r}, "b": {run!r}}})
print("pandas" in sys.modules)
api.close()
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


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


def test_what_the_overview_will_ask_for_is_read_ahead(tmp_path):
    """Asked for a run with `ahead`, or warmed up over one run, the server reads the statistic's column at once."""
    with tt.watch(to=tmp_path / "run") as tap:
        for _ in range(3):
            tt.tap(X, "x")
            tap.step()
    for begin in (lambda api: api.answer("/api/run", {"ahead": "std"}), lambda api: api.warm()):
        api = Api(str(tmp_path / "run"))
        begin(api)
        for _ in range(2):  # what warming up has begun begins something itself
            api._threads.early.submit(lambda: None).result()
        assert any("file" in key for key in api.grids._kept)
        api.answer("/api/run", {"ahead": "no such statistic"})
        api.close()


def test_the_order_of_a_file_is_known_from_its_footer(tmp_path, ask):
    """Where every step has the same places in one order the footer says so, and the grid is the same without it."""
    with tt.watch(to=tmp_path / "run") as tap:
        for step in range(6):
            for name in ("c", "a", "b"):
                tt.tap(X * (step + ord(name)), name)
            tap.step()
    with tt.watch(to=tmp_path / "uneven") as tap:
        for step in range(6):
            for name in ("c", "a", "b")[: 3 - step % 2]:
                tt.tap(X * (step + ord(name)), name)
            tap.step()
    outlines = {where: tt.open_run(tmp_path / where).snapshots.take().outlines[0] for where in ("run", "uneven")}
    assert [outlines["run"].places[i][0] for i in outlines["run"].order] == ["c", "a", "b"]
    assert outlines["uneven"].order == ()
    for where in outlines:
        found = brute(tmp_path / where, lambda record: record["std"])
        heat = ask("/api/heat", where, stat="std")
        names = [str(place) for place in tt.open_run(tmp_path / where).snapshots.take().places]
        wanted = expected(found, names, heat.columns["step"], np.mean)
        np.testing.assert_allclose(heat.columns["value"], wanted, rtol=1e-5)
