"""What the page says first: the sentence, groups of findings, the time line, ranks, collapsed modules, notes."""

from __future__ import annotations

import json
import os
from unittest.mock import patch

import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import NotARunError
from tensortap.finding import Finding, Steps
from tensortap.view.api.headline import groups_as_json, headline
from tensortap.view.api.query import RequestError
from tensortap.view.api.service import Api
from tensortap.view.api.timeline import Rate, Timeline, TimelineMark, jumps


def nonfinite(site="layers.0.norm1:output", step=159, **more):
    return Finding("nonfinite", "error", site, Steps(step, step + 9, 10), {"nan": 3}, "NaN of 3 elements.", **more)


def test_a_sentence_joins_a_jump_of_the_rate_and_the_nan_that_follows():
    """The cause stands before what follows it, whichever severity they have."""
    happened = Timeline((), tuple(jumps([Rate(0, 1e-3), Rate(158, 1e3)])))
    said = headline([nonfinite()], happened, "Net")
    assert said == "the learning rate rose ×1e6 at step 158; NaN from step 159, first in layers.0.norm1"
    assert headline([nonfinite(":output")], Timeline((), ()), "Net") == "NaN from step 159, first in Net"


def test_a_healthy_run_has_no_sentence():
    """Remarks and a schedule that rises are nothing wrong."""
    remark = Finding("low_precision", "info", "fc:output", None, {}, "Half of it is subnormal.")
    assert headline([remark], Timeline((), tuple(jumps([Rate(0, 1e-5), Rate(1, 1e-3)])))) == ""


def test_an_error_that_ended_the_run_ends_the_sentence():
    """What happened last is said last."""
    happened = Timeline((), (TimelineMark(160, "exception", "ended by RuntimeError"),))
    assert headline([nonfinite()], happened).endswith("ended by RuntimeError at step 160")


def test_nineteen_layers_are_one_group():
    """Findings of one rule are one item with all their places and steps, the earliest first."""
    found = [Finding("mine", "warning", f"h.{i}:output", Steps(30 - i, 40, 3), {}, "m") for i in range(19)]
    (group,) = groups_as_json(found)
    assert group["place_count"] == 19 and group["site"] == "h.18:output" and group["steps"]["first"] == 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first-look")
    launch = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517", "WORLD_SIZE": "4"}
    for rank in range(4):
        rng = np.random.default_rng(rank)
        with patch.dict(os.environ, launch), tt.watch(to=str(folder / "ranks"), rank=rank) as tap:
            for step in range(12):
                for name in ("embed", "blocks.0.a", "blocks.0.b", "blocks.1.a"):
                    tt.tap(rng.normal(size=256).astype(np.float32) * (1 + 2 * (rank == 2)), name)
                tap.step(loss=float("nan") if step == 9 else 1.0, lr=0.1 if step < 6 else 1e-3)
    return folder


@pytest.fixture
def api(runs):
    made = Api(str(runs))
    yield made
    made.close()


def test_ranks_are_shown_apart(api):
    """One rank's values, the spread of all, and the rank that differs."""
    ask = lambda **given: api.answer("/api/heat", {"run": "ranks", **given}).columns["value"]  # noqa: E731
    assert ask(rank="2").mean() == pytest.approx(3, rel=0.1)
    assert ask(rank="0").mean() == pytest.approx(1, rel=0.1)
    assert 0.7 < ask(rank="spread").mean() < 1.3
    assert api.answer("/api/ranks", {"run": "ranks"}).header["outlier"] == 2
    with pytest.raises(RequestError, match="rank must be one of 0, 1, 2, 3"):
        ask(rank="7")


def test_a_collapsed_module_is_one_row(api):
    """Its value is the mean of its sites, its bounds are theirs, and rows are counted as they are shown."""
    whole = api.answer("/api/heat", {"run": "ranks"})
    folded = api.answer("/api/heat", {"run": "ranks", "fold": json.dumps(["blocks"])})
    assert folded.header["total"] == 2 and folded.columns["row"].tolist() == [0, 1]
    np.testing.assert_allclose(folded.columns["value"][1], whole.columns["value"][1:].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(folded.columns["high"][1], whole.columns["high"][1:].max(axis=0), rtol=1e-5)
    with pytest.raises(RequestError, match="fold must be a JSON list"):
        api.answer("/api/heat", {"run": "ranks", "fold": "blocks"})


def test_a_time_line_from_metrics(api):
    """Without events the learning rate is the metric of that name."""
    said = api.answer("/api/timeline", {"run": "ranks"})
    assert said["rate"] == {"steps": [0, 6], "values": [0.1, 1e-3]}
    assert [mark["text"] for mark in said["marks"]] == ["the learning rate fell to 1/100"]


def test_a_card_tells_nan_from_fine(api):
    """The list of runs has the last metrics, a line over steps, and the first step that is not finite."""
    said = api.answer("/api/card", {"run": "ranks"})
    assert said["nonfinite"] == 9
    assert said["metrics"]["loss"]["last"] == 1.0 and None in said["metrics"]["loss"]["line"]


def test_notes_are_kept_beside_the_runs(api, runs):
    """Nothing in a run changes; a run that is not there has no notes."""
    before = sorted(str(path) for path in (runs / "ranks").rglob("*"))
    api.write_note("ranks", ["a", "a", " b "], "why")
    assert sorted(str(path) for path in (runs / "ranks").rglob("*")) == before
    assert api.answer("/api/runs", {})["runs"][0]["tags"] == ["a", "b"]
    with pytest.raises(NotARunError, match="no run"):
        api.write_note("nope", [], "")
    with pytest.raises(RequestError, match="at most"):
        api.write_note("ranks", ["x" * 50], "")
