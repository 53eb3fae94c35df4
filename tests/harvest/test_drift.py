"""What a harvest shows, and how far one has drifted from another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from harvest.subjects import make_data
from torch import nn

import tensortap as tt
from tensortap.cli.app import cli
from tensortap.errors import HarvestError
from tensortap.harvest.drift import adjust, drift, one_row_per_sample, two_sample_test
from tensortap.harvest.summary import DirectionSketch, summarize_sites, top

WIDTH = 24


def documents(seed: int, shift: float = 0.0, count: int = 400) -> list[np.ndarray]:
    """Documents of 8 tokens that have much in common; of the first dimension the mean can be moved."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, 1, WIDTH)) + 0.1 * random.normal(size=(count, 8, WIDTH))
    rows[..., 0] += shift
    rows[..., 1] = 3.0  # never changes
    rows[..., 2] = np.abs(rows[..., 2]) + 0.1  # always positive
    return list(rows.astype(np.float32))


def harvested(folder: Path, data: Any) -> tt.Harvest:
    return tt.harvest(nn.Identity(), data, ":output", to=folder, batch_size=50, progress=False)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> tt.Harvest:
    return harvested(tmp_path_factory.mktemp("drift") / "baseline", documents(0))


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tt.Harvest:
    return harvested(tmp_path_factory.mktemp("drift") / "moved", documents(1, shift=1.0))


def test_drift_is_found_where_it_is(baseline: tt.Harvest, moved: tt.Harvest) -> None:
    """The dimension whose mean has moved is named, and no other."""
    found = tt.diff(baseline, moved)
    assert not found
    assert found.sites[0].drifted == (0,)
    assert found.sites[0].samples == (400, 400)
    assert "1 dimension of 1 site drifted" in str(found)
    assert isinstance(tt.diff(baseline.path, moved.path), tt.Drift)


def test_nothing_is_found_where_nothing_is(baseline: tt.Harvest, tmp_path: Path) -> None:
    """Two harvests of the same population agree, although the tokens of a document depend on each other."""
    same = harvested(tmp_path / "same", documents(2))
    assert tt.diff(baseline, same)
    every = np.concatenate([batch.values for batch in baseline.batches(4096)])
    others = np.concatenate([batch.values for batch in same.batches(4096)])
    assert (adjust(two_sample_test(every, others)) < 0.01).any()  # what taking all tokens would have said


def test_the_test_is_scipys() -> None:
    """The p-values are those of scipy's asymptotic two-sample test, nearly."""
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    a, b = random.normal(size=(300, 4)), random.normal(size=(200, 4)) + np.array([0.0, 0.1, 0.3, 1.0])
    want = [stats.ks_2samp(a[:, i], b[:, i], method="asymp").pvalue for i in range(4)]
    assert np.allclose(two_sample_test(a, b), want, rtol=0.25, atol=0.02)


def test_false_alarms_are_controlled() -> None:
    """Of 200 comparisons without drift, at most a few report any at 1 %."""
    random = np.random.default_rng(3)
    alarms = 0
    for _ in range(200):
        a, b = random.normal(size=(2, 60, 20))
        alarms += bool((adjust(two_sample_test(a, b)) < 0.01).any())
    assert alarms <= 6  # 2 are expected; 7 or more have a chance of less than one in 200


def test_one_row_of_each_sample(baseline: tt.Harvest) -> None:
    """A comparison takes one random row of each sample, and no more samples than asked for."""
    rows = one_row_per_sample(baseline, ":output", 100, seed=0)
    assert rows.shape == (100, WIDTH)
    whole = np.stack(documents(0))
    assert {tuple(row) for row in rows} <= {tuple(token) for document in whole for token in document}


def test_too_little_to_tell(baseline: tt.Harvest, tmp_path: Path) -> None:
    """A handful of samples, or a site of another width, is refused."""
    few = harvested(tmp_path / "few", documents(0, count=10))
    with pytest.raises(HarvestError, match="at least 30 samples"):
        drift(baseline, few)
    wide = tt.harvest(nn.Identity(), [np.ones((40, 3), np.float32)], ":output", to=tmp_path / "wide", progress=False)
    with pytest.raises(HarvestError, match="24 wide"):
        drift(baseline, wide)


def test_what_a_harvest_shows(baseline: tt.Harvest) -> None:
    """Dead and dense dimensions are named, and the spectrum adds up to the whole variance."""
    (site,) = summarize_sites(baseline)
    assert site.dead == [1]
    assert site.dense == [2]
    assert site.spectrum == sorted(site.spectrum, reverse=True)
    assert sum(site.spectrum) == pytest.approx(1.0, abs=1e-3)
    assert len(site.spectrum) == WIDTH - 1


def test_the_sketch_is_close_to_the_whole() -> None:
    """Of many more dimensions than it holds, the sketch finds the large axes within its bound."""
    random = np.random.default_rng(0)
    scale = 0.9 ** np.arange(200)
    rows = random.normal(size=(4000, 200)) * scale
    rows -= rows.mean(axis=0)
    sketch = DirectionSketch(200)
    sketch.add(rows)
    want = np.linalg.svd(rows, compute_uv=False) ** 2 / (rows**2).sum()
    assert np.allclose(sketch.shares()[:10], want[:10], atol=1 / 64)


def test_top_activations_with_their_text(tmp_path: Path) -> None:
    """The samples that activate a dimension most come with the text around the token."""
    weight = np.random.default_rng(0).uniform(size=(50, 4)).astype(np.float32)
    weight[20, 2] = 5.0
    model = nn.Embedding.from_pretrained(torch.from_numpy(weight))
    data = make_data(40)
    keep = tt.tokens(mask="attention_mask")
    acts = tt.harvest(model, data, ":output", to=tmp_path / "acts", keep=keep, batch_size=8, inputs=["input"],
                      collate=lambda some: _batch(some), progress=False)  # fmt: skip
    best = top(acts, ":output", 2, k=3, decode=lambda ids: " ".join(map(str, ids)))
    assert all((row.token, row.value) == (20, 5.0) for row in best)
    assert len({row.sample for row in best}) == 3
    for row in best:
        assert row.text == " ".join(map(str, data[row.sample]["input_ids"]))


def _batch(some: list[Any]) -> dict[str, Any]:
    length = max(len(sample["input_ids"]) for sample in some)
    pad = [np.pad(sample["input_ids"], (0, length - len(sample["input_ids"]))) for sample in some]
    mask = [np.pad(sample["attention_mask"], (0, length - len(sample["input_ids"]))) for sample in some]
    return {"input": np.stack(pad), "input_ids": np.stack(pad), "attention_mask": np.stack(mask)}


def test_the_commands(baseline: tt.Harvest, moved: tt.Harvest, tmp_path: Path) -> None:
    """`show` draws a harvest, `check --against` exits with 1 where it has drifted, `harvest` makes one."""
    run = CliRunner().invoke
    shown = run(cli, ["show", baseline.path])
    assert shown.exit_code == 0 and ":output" in shown.output and "3,200" in shown.output
    found = json.loads(run(cli, ["show", baseline.path, "--json"]).output)
    assert found["sites"][0]["dead"] == [1]
    assert "dimension 5" in run(cli, ["show", baseline.path, "--dimension", "5"]).output
    drifted = run(cli, ["check", moved.path, "--against", baseline.path])
    assert drifted.exit_code == 1 and "1 dimension of 1 site drifted" in drifted.output
    assert run(cli, ["check", baseline.path, "--against", baseline.path, "--json"]).exit_code == 0
    assert run(cli, ["check", str(tmp_path), "--against", baseline.path]).exit_code == 2


def test_what_fits_on_a_terminal(baseline: tt.Harvest, tmp_path: Path) -> None:
    """80 columns have room for dead and dense dimensions and the axes; what is not finite is shown where it is."""
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["show", baseline.path]).output
    assert all(title in shown for title in ("dead", "dense", "axes for 90 %"))
    assert "not finite" not in shown
    tt.harvest(nn.Identity(), [torch.tensor([[1.0, np.nan]])], ":output", to=tmp_path / "bad", progress=False)
    assert "not finite" in CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["show", str(tmp_path / "bad")]).output


def test_the_largest_elements_have_no_dead_dimensions(tmp_path: Path) -> None:
    """Of rows that hold the largest elements only, a column is a rank and not a dimension."""
    rows = torch.arange(1.0, 25.0).reshape(6, 4)
    acts = tt.harvest(nn.Identity(), [rows], ":output", to=tmp_path / "acts", keep=tt.top_k(2), progress=False)
    (site,) = summarize_sites(acts)
    assert (site.dead, site.dense, site.spectrum) == ([], [], [])


def test_the_harvest_command(tmp_path: Path) -> None:
    """`tensortap harvest module:factory` makes a harvest and, called again, says that it is complete."""
    words = ["harvest", "harvest.subjects:make_model", "blocks.0", "--data", "harvest.subjects:make_data"]
    words += ["--to", str(tmp_path / "acts"), "--mask", "attention_mask", "--dtype", "bf16", "--batch-size", "8"]
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert tt.open_harvest(tmp_path / "acts").rows == 294
    assert "complete already" in CliRunner().invoke(cli, words).output
    assert "cannot be imported" in CliRunner().invoke(cli, ["harvest", "nowhere:x", *words[2:]]).output
    assert "other options" in CliRunner().invoke(cli, [*words, "--seed", "3"]).output


def test_the_largest_elements_are_not_compared(tmp_path: Path) -> None:
    """Of rows that hold the largest elements only, no dimension can be said to have drifted."""
    data = [np.random.default_rng(0).normal(size=(40, 3, 8)).astype(np.float32)]
    acts = tt.harvest(torch.nn.Identity(), data, ":output", to=tmp_path / "a", keep=tt.top_k(2), progress=False)
    with pytest.raises(HarvestError, match=r":output must be kept whole, .* keep=tt.tokens\(\)"):
        tt.diff(acts, acts)


@pytest.mark.parametrize("options", [["--keep", "mean", "--share", "0.1"], ["--keep", "samples", "--mask", "m"]])
def test_options_that_would_do_nothing_are_refused(options: list[str], tmp_path: Path) -> None:
    """A share of what are no tokens, and a mask of whole samples, are refused on the command line."""
    result = CliRunner().invoke(cli, ["harvest", "os:getcwd", "x", "--data", "d", "--to", str(tmp_path), *options])
    assert result.exit_code != 0
    assert "must be given with" in str(result.exception) + result.output


@pytest.mark.parametrize("wrong", [{"psi": "0.2"}, {"significance": 0}, {"samples": None}])
def test_wrong_limits_are_named(baseline: tt.Harvest, wrong: dict[str, Any]) -> None:
    """What is no number above 0 is refused with its name."""
    with pytest.raises(HarvestError, match=rf"{next(iter(wrong))} must be a number above 0, got"):
        tt.diff(baseline, baseline, **wrong)
