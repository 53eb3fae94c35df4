"""Several processes: while the first makes the plan, the others run a batch of their own instead of the same one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harvest.subjects import Model, contents, make_data, make_model
from harvest.test_resume import Deadly, killed
from torch import Tensor, nn

import tensortap as tt
from tensortap.distributed.ranks import World
from tensortap.harvest.ahead import batch_to_run_ahead, plan_of_another
from tensortap.harvest.folder import HarvestFolder
from tensortap.harvest.plan import cut_into_parts

Harvest = Callable[[nn.Module, Path], tt.Harvest]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, so that the bytes are those of any process; and no waiting for the disk."""
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def in_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")


def side_by_side(harvest: Harvest, models: list[nn.Module], to: Path, monkeypatch: pytest.MonkeyPatch) -> tt.Harvest:
    """Harvest with two processes, of which the first does all that is its own while the second looks for the plan."""

    def found(folder: HarvestFolder, seconds: float) -> Any:
        in_rank(monkeypatch, 0)
        assert not harvest(models[0], to).complete
        return plan_of_another(folder, seconds)

    monkeypatch.setattr(importlib.import_module("tensortap.harvest.run"), "plan_of_another", found)
    in_rank(monkeypatch, 1)
    acts = harvest(models[1], to)
    monkeypatch.undo()
    return acts


SOURCES: dict[str, Callable[[], Any]] = {
    "samples": make_data,
    "batches": lambda: [{"input_ids": torch.full((4, 3), n), "attention_mask": torch.ones(4, 3)} for n in range(15)],
    "a generator": lambda: iter(SOURCES["batches"]()),
}


@pytest.mark.parametrize(
    ("source", "size"),
    [("samples", "1MB"), ("samples", 100), ("batches", "1MB"), ("batches", 100), ("a generator", 100)],
)
def test_no_batch_is_run_twice(source: str, size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes run as many batches as there are, not one more, and come to the bytes of one."""

    def harvest(model: nn.Module, to: Path) -> tt.Harvest:
        options: dict[str, Any] = {"shard_size": size, "spread": 1, "batch_size": 4 if source == "samples" else None}
        data = SOURCES[source]()
        return tt.harvest(model, data, "blocks.0", "blocks.1", to=to, progress=False, **options,
                          keep=tt.tokens(mask="attention_mask"))  # fmt: skip

    alone, models = make_model(), [make_model(), make_model()]
    harvest(alone, tmp_path / "one")
    assert side_by_side(harvest, [*models], tmp_path / "two", monkeypatch).complete
    assert sum(model.blocks[0].calls for model in models) == alone.blocks[0].calls == 15
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


class Branching(Model):
    """Leaves out the second block where a batch holds no 1."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.blocks[0](self.embed(input_ids))
        return self.head(self.blocks[1](x) if (input_ids == 1).any() else x)


def test_a_batch_that_reaches_other_sites_than_the_plan_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first batch reaches decides where a forward pass is left, though another batch was run before it."""
    first_alone = np.ones((15, 4, 3), np.int64)
    first_alone[1] = 2  # the batch that the second process runs ahead

    def harvest(model: nn.Module, to: Path) -> tt.Harvest:
        data = list(torch.from_numpy(first_alone))
        return tt.harvest(model, data, "blocks.0", "blocks.1", to=to, shard_size=300, spread=1, progress=False)

    made: list[nn.Module] = []
    for _ in range(3):
        torch.manual_seed(0)
        made.append(Branching())
    whole = harvest(made[0], tmp_path / "one")
    two = side_by_side(harvest, made[1:], tmp_path / "two", monkeypatch)
    assert (whole.rows, two.rows) == (15 * 12 + 14 * 12,) * 2
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_a_sample_that_raises_ahead_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that cannot be run ahead is dealt with when its part is done."""
    data = make_data()
    data[5]["input_ids"] = data[5]["input_ids"] + 50

    def harvest(model: nn.Module, to: Path) -> tt.Harvest:
        return tt.harvest(model, data, "blocks.0", to=to, batch_size=4, keep=tt.tokens(mask="attention_mask"),
                          progress=False)  # fmt: skip

    harvest(make_model(), tmp_path / "one")
    for rank in (1, 0):
        in_rank(monkeypatch, rank)
        acts = harvest(make_model(), tmp_path / "two")
    assert [each["sample"] for each in acts.set_aside] == [5]
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_a_sample_that_kills_ahead_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in which the process died is not run ahead again, though there is no plan yet."""
    data = list(np.arange(40, dtype=np.float32).reshape(-1, 1))
    deaths = 0

    def harvest() -> tt.Harvest:
        options: dict[str, Any] = {"batch_size": 4, "shard_size": 16, "spread": 1, "progress": False}
        return tt.harvest(Deadly(), data, ":output", to=tmp_path / "acts", **options)

    in_rank(monkeypatch, 1)
    while killed(harvest, 10**9):
        assert (tmp_path / "acts/harvest.json").exists() == (deaths > 0)
        deaths += 1
        assert deaths < 10
    in_rank(monkeypatch, 0)
    assert [each["sample"] for each in harvest().set_aside] == [7]
    assert deaths == 6
    assert not (tmp_path / "acts/.partial").exists()


def test_no_process_waits_for_long(tmp_path: Path) -> None:
    """The plan of another process is waited for as long as it takes to run a batch, and no longer."""
    slept: list[float] = []
    assert plan_of_another(HarvestFolder(tmp_path), 2.0, slept.append) is None
    assert sum(slept) == pytest.approx(2.0)


@pytest.mark.parametrize("batches", [2, 15, 24, 96, 1000])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_batch_ahead_is_one_of_the_processs_own(batches: int, size: int) -> None:
    """The batch is in a part of the process that ran it where parts are long; of two processes, in short ones too."""
    for rank in range(1, size):
        number = batch_to_run_ahead(World(rank, size), batches)
        longest, _ = cut_into_parts(1.0, batches, 10**12, 1)
        if number is None:
            assert batches <= rank * longest
        else:
            assert number // longest % size == rank
            assert size > 2 or number % size == rank


def test_several_processes_share_batches_of_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of batches is cut into parts by its length, so that there is work for all."""
    calls = []
    for rank in (0, 1):
        in_rank(monkeypatch, rank)
        model = make_model()
        data = [torch.full((2, 3), n) for n in range(16)]
        assert tt.harvest(model, data, "blocks.0", to=tmp_path / "acts", progress=False).complete == (rank == 1)
        calls.append(model.blocks[0].calls)
    assert calls == [8, 8]
