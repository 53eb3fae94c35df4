"""What is harvested: the values a forward pass gives, which rows, from where, and how little of the model runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from harvest.subjects import WIDTH, contents, make_data, make_model
from torch import Tensor, nn

import tensortap as tt
from tensortap.errors import HarvestError, PatternError
from tensortap.harvest.collate import collated

MASKED = {"keep": tt.tokens(mask="attention_mask"), "batch_size": 8, "progress": False}


def all_rows(acts: tt.Harvest, site: str) -> dict[tuple[int, int], np.ndarray]:
    """Every row by sample and position; one that comes twice is an error."""
    rows: dict[tuple[int, int], np.ndarray] = {}
    for batch in acts.batches(7, site):
        for place, values in zip(
            zip(batch.sample.tolist(), batch.position.tolist(), strict=True), batch[site], strict=True
        ):
            assert place not in rows
            rows[place] = values
    return rows


def expected(model: nn.Module, data: list[dict[str, Any]], path: str) -> dict[tuple[int, int], np.ndarray]:
    """What a plain hook sees, token by token."""
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(lambda m, a, out: seen.append(out.detach().clone()))
    rows = {}
    model.eval()
    for start in range(0, len(data), 8):
        batch = collated(data[start : start + 8])
        with torch.no_grad():
            model(torch.from_numpy(batch["input_ids"]))
        for i, j in np.argwhere(batch["attention_mask"]):
            rows[start + int(i), int(j)] = seen[-1][i, j].numpy()
    handle.remove()
    model.train()
    return rows


def test_values_are_those_of_a_forward_pass(tmp_path: Path) -> None:
    """Every token's row is bit for bit what a hook sees in evaluation mode, once, and padding is left out."""
    model, data = make_model(), make_data()
    acts = tt.harvest(model, data, "blocks.1:output", "blocks.2.mlp:output", to=tmp_path / "acts", **MASKED)
    for site, path in (("blocks.1:output", "blocks.1"), ("blocks.2.mlp:output", "blocks.2.mlp")):
        want = expected(model, data, path)
        got = all_rows(acts, site)
        assert got.keys() == want.keys()
        assert all(np.array_equal(got[place], want[place]) for place in want)
    assert acts.complete
    assert acts.samples == 60
    assert acts.rows == 2 * sum(len(sample["input_ids"]) for sample in data)


def test_rows_know_where_they_come_from(tmp_path: Path) -> None:
    """Each row has its sample, position and token id, and the file names the site."""
    data = make_data()
    acts = tt.harvest(make_model(), data, "blocks.0", to=tmp_path / "acts", dtype="bf16", **MASKED)
    for batch in acts.batches(16):
        assert batch.values.dtype == ml_dtypes.bfloat16
        for sample, position, token in zip(batch.sample, batch.position, batch.token, strict=True):
            assert data[sample]["input_ids"][position] == token
    assert acts.sites == ["blocks.0:output"]


@pytest.mark.parametrize("stop", ["auto", None])
def test_the_forward_pass_stops_after_the_last_site(stop: Any, tmp_path: Path) -> None:
    """With stop="auto" later blocks run for the first batch only; the bytes are the same."""
    model = make_model()
    tt.harvest(model, make_data(), "blocks.1", to=tmp_path / "acts", stop=stop, **MASKED)
    tt.harvest(model, make_data(), "blocks.1", to=tmp_path / "whole", stop=None, **MASKED)
    passes = [block.calls for block in model.blocks]
    assert passes[1] == 2 * 8
    assert passes[2] == (8 + 8 if stop is None else 8 + 1)  # the batch that the plan is made of
    assert contents(tmp_path / "acts") == contents(tmp_path / "whole")


class Catching(nn.Module):
    """Catches everything that its inner model raises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.caught: list[BaseException] = []

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except Exception as error:
            self.caught.append(error)
            raise
        except BaseException:
            return x


def test_no_exception_reaches_the_users_code(tmp_path: Path) -> None:
    """`except Exception` in a model never sees how a forward pass is left, and catching everything loses nothing."""
    model = Catching()
    data = [torch.randn(2, 3) for _ in range(20)]
    acts = tt.harvest(model, data, "inner.0", to=tmp_path / "acts", progress=False)
    assert not model.caught
    assert len(all_rows(acts, "inner.0:output")) == 40


def test_a_reused_module_is_never_left_early(tmp_path: Path) -> None:
    """Every call of a module that is called several times is a site of its own."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    acts = tt.harvest(Twice(), [torch.randn(2, 3)] * 9, "fc", to=tmp_path / "acts", progress=False)
    assert acts.sites == ["fc:output", "fc:output#1"]
    assert acts.rows == 36


class Branching(nn.Module):
    """Runs its second layer for batches above zero only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return self.second(out) if x.sum() > 0 else out


def test_a_site_that_the_first_batch_does_not_reach_is_not_lost(tmp_path: Path) -> None:
    """A forward pass is not left before a chosen site that some batch may still reach: its rows would be lost."""
    below, above = [-torch.ones(2, 3)] * 3, [torch.ones(2, 3)] * 3
    with pytest.raises(HarvestError, match="samples 6 to 7 reach second:output, which the first batch did not"):
        tt.harvest(Branching(), below + above, "first", "second", to=tmp_path / "a", progress=False)
    acts = tt.harvest(Branching(), above + below, "first", "second", to=tmp_path / "b", progress=False)
    assert [acts.statistics(site).rows for site in acts.sites] == [12, 6]


class Remembering(nn.Module):
    """Adds what came out of the batch before, which it keeps in a buffer, to each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("before", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x + self.before))
        self.before = out.mean(dim=0)
        return out


def test_a_model_that_changes_its_buffers_is_never_left_early(tmp_path: Path) -> None:
    """What a model keeps for the next batch is computed behind the last site, and decides the next batch's rows."""
    data = [torch.randn(2, 3) for _ in range(6)]
    for stop in ("auto", None):
        torch.manual_seed(0)
        tt.harvest(Remembering(), data, "first", to=tmp_path / str(stop), stop=stop, progress=False)  # type: ignore[arg-type]
    assert contents(tmp_path / "auto") == contents(tmp_path / "None")


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    """Modes, hooks, parameters and random state are those from before."""
    model = make_model()
    model.blocks[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seed = torch.get_rng_state()
    tt.harvest(model, make_data(), "blocks.1", to=tmp_path / "acts", **MASKED)
    assert [block.training for block in model.blocks] == [True, False, True, True]
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(seed, torch.get_rng_state())


KEPT: dict[str, Any] = {
    "tokens": (tt.tokens(mask="attention_mask"), 294, WIDTH),
    "last": (tt.tokens(mask="attention_mask", positions=-1), 60, WIDTH),
    "ends": (tt.tokens(mask="attention_mask", positions=[0, -1]), 120, WIDTH),
    "mean": (tt.pooled("mean", mask="attention_mask"), 60, WIDTH),
    "max": (tt.pooled("max", mask="attention_mask"), 60, WIDTH),
    "pooled last": (tt.pooled("last", mask="attention_mask"), 60, WIDTH),
    "top_k": (tt.top_k(3, mask="attention_mask"), 294, 3),
    "function": (lambda values, batch: values.mean(axis=1)[:, :4], 60, 4),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str, tmp_path: Path) -> None:
    """Tokens, positions, pooled vectors, the largest elements and a function's answer are kept as asked."""
    keep, rows, width = KEPT[name]
    data = make_data()
    acts = tt.harvest(make_model(), data, "blocks.0", to=tmp_path / "a", keep=keep, batch_size=8, progress=False)
    (batch,) = acts.batches(1000)
    assert batch.values.shape == (rows, width)
    want = expected(make_model(), data, "blocks.0")
    for row in range(0, rows, 17):
        sample, position = int(batch.sample[row]), int(batch.position[row])
        own = np.stack([want[sample, i] for i in range(len(data[sample]["input_ids"]))])
        if name in ("mean", "max"):
            assert np.allclose(batch.values[row], getattr(own, name)(axis=0), atol=1e-6)
        elif name == "pooled last":
            assert np.array_equal(batch.values[row], own[-1])
        elif name == "top_k":
            assert np.array_equal(batch.values[row], np.sort(own[position])[::-1][:3])
            assert np.array_equal(own[position][batch.indices["blocks.0:output"][row]], batch.values[row])
        elif name != "function":
            assert np.array_equal(batch.values[row], own[position])


def test_a_share_of_tokens_does_not_depend_on_batches(tmp_path: Path) -> None:
    """The same tokens are drawn for one seed whatever the batch size, and about as many as asked for."""
    chosen = []
    for size in (4, 8):
        keep = tt.tokens(mask="attention_mask", share=0.25, seed=3)
        acts = tt.harvest(make_model(), make_data(400), "blocks.0", to=tmp_path / str(size), keep=keep, batch_size=size,
                          progress=False)  # fmt: skip
        chosen.append(set(all_rows(acts, "blocks.0:output")))
    assert chosen[0] == chosen[1]
    total = sum(len(sample["input_ids"]) for sample in make_data(400))
    assert abs(len(chosen[0]) - total / 4) < 4 * (total * 3 / 16) ** 0.5


def test_images_need_an_axis(tmp_path: Path) -> None:
    """Of a feature map the user says which dimension holds the features."""
    model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU())
    data = [torch.randn(2, 1, 6, 6)] * 2
    with pytest.raises(HarvestError, match=r"axis=1"):
        tt.harvest(model, data, "1", to=tmp_path / "a", progress=False)
    rows = tt.harvest(model, data, "1", to=tmp_path / "b", keep=tt.tokens(axis=1), progress=False)
    assert (rows.rows, rows.plan.sites[0].width) == (4 * 16, 5)
    whole = tt.harvest(model, data, "1", to=tmp_path / "c", keep=tt.samples(), progress=False)
    assert (whole.rows, whole.plan.sites[0].width) == (4, 80)


def test_statistics_are_those_of_the_rows(tmp_path: Path) -> None:
    """Mean, deviation, minimum, maximum and counts by dimension are those of what was written."""
    acts = tt.harvest(make_model(), make_data(), "blocks.1", to=tmp_path / "acts", **MASKED)
    rows = np.stack(list(all_rows(acts, "blocks.1:output").values())).astype(np.float64)
    found = acts.statistics("blocks.1")
    assert np.allclose(found.mean, rows.mean(axis=0))
    assert np.allclose(found.std, rows.std(axis=0))
    assert np.array_equal(found.min, rows.min(axis=0))
    assert np.array_equal(found.positive, (rows > 0).sum(axis=0))
    assert found.histogram.sum() == np.count_nonzero(rows)
    assert np.isclose(found.totals()["std"], rows.std())


def test_nothing_that_is_not_finite_hides(tmp_path: Path) -> None:
    """NaN and infinities are counted by dimension, and the moments are those of the rest."""
    rows = np.array([[1.0, np.nan], [3.0, 2.0], [np.inf, 4.0]], np.float32)
    model = nn.Identity()
    acts = tt.harvest(model, [torch.from_numpy(rows)], ":output", to=tmp_path / "acts", progress=False)
    found = acts.statistics(":output")
    assert found.nonfinite.tolist() == [1, 1]
    assert found.mean.tolist() == [2.0, 3.0]
    assert found.max.tolist() == [3.0, 4.0]


BAD: dict[str, Any] = {
    "no such site": ({"sites": ["blocks.9"]}, PatternError, "blocks.9"),
    "no data": ({"data": []}, HarvestError, "yields nothing"),
    "no Parquet": ({"data": __file__}, HarvestError, "test_harvest.py is not a Parquet file"),
    "no site": ({"sites": []}, HarvestError, "at least one site"),
    "mask": ({"keep": tt.tokens(mask="attention_musk")}, HarvestError, "attention_mask"),
    "dtype": ({"dtype": "bf61"}, HarvestError, "bfloat16"),
    "engine": ({"engine": "spark"}, HarvestError, "tt.Ray"),
    "keep": ({"keep": 3}, HarvestError, "tokens"),
    "stop": ({"stop": "always"}, HarvestError, "auto"),
    "lengths without a mask": ({"data": [{"input_ids": [1, 2]}, {"input_ids": [1]}]}, HarvestError, "collate"),
    "inputs": ({"inputs": ["pixels"]}, HarvestError, "pixels"),
    "shard_size": ({"shard_size": "big"}, HarvestError, "256MB"),
    "seed": ({"seed": "one"}, HarvestError, "seed must be a whole number"),
    "axis": ({"keep": tt.tokens(axis=5)}, HarvestError, r"blocks.0:output: axis must be one of 1 to 2 of \[8,"),
    "the site of a bad mask": (
        {"keep": tt.tokens(mask="text"), "collate": collated},
        HarvestError,
        "blocks.0:output",
    ),
}
KEEPS: dict[str, Any] = {
    "share": lambda: tt.tokens(share="half"),  # type: ignore[arg-type]
    "positions": lambda: tt.tokens(positions="last"),  # type: ignore[arg-type]
    "seed": lambda: tt.tokens(seed=-1),
    "k": lambda: tt.top_k("ten"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", KEEPS)
def test_bad_keeps_say_what_to_write(name: str) -> None:
    """Every wrong argument of what is kept raises an error that names it."""
    with pytest.raises(HarvestError, match=f"{name} must be"):
        KEEPS[name]()


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_say_what_to_write(name: str, tmp_path: Path) -> None:
    """Every wrong argument raises an error that names it."""
    options, kind, said = BAD[name]
    given = {"data": make_data(), "sites": ["blocks.0"], "batch_size": 8, "progress": False} | options
    with pytest.raises(kind, match=said):
        tt.harvest(make_model(), given.pop("data"), *given.pop("sites"), to=tmp_path / "acts", **given)


def test_wide_rows_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Rows that are larger than a block are written one by one, so that they do not fill the memory."""
    acts = tt.harvest(nn.Identity(), [torch.ones(4, 600_000)], ":output", to=tmp_path / "acts", progress=False)
    assert acts.plan.block_rows == 1


def test_vectors_of_different_lengths_are_refused(tmp_path: Path) -> None:
    """A model whose width changes from batch to batch is named with both widths, and what is committed stays."""
    data = [torch.ones(2, 3)] * 4 + [torch.ones(2, 5)]
    with pytest.raises(HarvestError, match=r"one length, got 5 elements for samples 8 to 9 after 3"):
        tt.harvest(nn.Identity(), data, ":output", to=tmp_path / "acts", shard_size=24, spread=1, progress=False)
    assert tt.open_harvest(tmp_path / "acts").rows == 8


def test_a_sample_that_the_model_raises_on_is_set_aside(tmp_path: Path) -> None:
    """One bad sample is named and counted, and all others are there."""
    data = make_data()
    data[13]["input_ids"] = data[13]["input_ids"] + 50
    acts = tt.harvest(make_model(), data, "blocks.0", to=tmp_path / "acts", **MASKED)
    assert [each["sample"] for each in acts.set_aside] == [13]
    assert {sample for sample, _ in all_rows(acts, "blocks.0:output")} == set(range(60)) - {13}


def test_a_model_that_always_raises_stops_the_harvest(tmp_path: Path) -> None:
    """Where every sample fails, the model's own error is shown."""
    data = make_data(8) + [{"input_ids": np.array([99, 99]), "attention_mask": np.ones(2, int)}] * 8
    with pytest.raises(HarvestError, match=r"samples 8 to 15: IndexError"):
        tt.harvest(make_model(), data, "blocks.0", to=tmp_path / "acts", **MASKED)
    assert tt.open_harvest(tmp_path / "acts").samples == 8


class TwoThings(nn.Module):
    """Returns a vector for each sample, and a bias that has nothing to do with samples, as layers of T5 do."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"hidden": x * 2, "bias": torch.zeros(1, 4, 4), "aux": x.sum()}


def test_what_has_no_samples_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what a module returns, tensors without a dimension for samples are named and left out, in every batch."""
    data = [torch.ones(2, 3), torch.ones(1, 3)]
    acts = tt.harvest(TwoThings(), data, ":output", to=tmp_path / "acts")
    assert acts.sites == [":output.hidden"]
    assert acts.rows == 3
    assert "left out: :output.bias, :output.aux" in capsys.readouterr().err


def test_writing_imports_no_pandas(tmp_path: Path) -> None:
    """Pandas, which takes a fifth of a second of every worker's time, is not loaded to write a shard."""
    code = (
        "import sys, torch, tensortap as tt\n"
        "tt.harvest(torch.nn.Identity(), [torch.ones(2, 3, 4)], ':output', to=sys.argv[1], progress=False)\n"
        "assert 'pyarrow' in sys.modules and 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "acts")], check=True)


def test_a_terminal_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal a bar shows the share that is done, the time left, rows a second and bytes, for a list too."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    tt.harvest(nn.Linear(4, 3), [torch.ones(2, 4)] * 3, ":output", to=tmp_path / "acts")
    shown = capsys.readouterr().err
    assert "100%" in shown
    assert "0:00:00" in shown
    assert re.search(r"[\d,]+ rows/s +72 B", shown)
