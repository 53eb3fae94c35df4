"""Exactly once: whatever ends a harvest, the same call goes on and comes to the same bytes."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harvest.subjects import contents, make_data, make_model
from torch import nn

import tensortap as tt
from tensortap.distributed.ranks import World
from tensortap.errors import HarvestError, MissingExtraError
from tensortap.harvest.engines import Processes
from tensortap.harvest.folder import HarvestFolder
from tensortap.store.files import Files

OPTIONS: dict[str, Any] = {
    "keep": tt.tokens(mask="attention_mask"),
    "batch_size": 4,
    "dtype": "bf16",
    "progress": False,
}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote; only a machine without power does."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def harvest(to: Path, model: nn.Module | None = None, **options: Any) -> tt.Harvest:
    chosen = {"shard_size": 700, "spread": 2} | OPTIONS | options
    return tt.harvest(model or make_model(), make_data(24), "blocks.0", "blocks.1", to=to, **chosen)


def killed(run: Callable[[], object], after: int) -> bool:
    """Run in a process of its own that kills itself before the n-th time it writes or renames a file."""
    child = os.fork()
    if not child:
        left = [after]

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapper

        torch.set_num_threads(1)
        for owner, name in ((Files, "write"), (Files, "remove"), (Files, "remove_all"), (HarvestFolder, "publish")):
            setattr(owner, name, counted(getattr(owner, name)))
        try:
            run()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_at_every_write(tmp_path: Path) -> None:
    """Killed before each write in turn, a harvest that is called again ends with the bytes of one left in peace."""
    torch.set_num_threads(1)
    harvest(tmp_path / "whole")
    want = contents(tmp_path / "whole")
    deaths = 0
    for after in (0, 3, 9, 16, 33, 37, 40):
        folder = tmp_path / str(after)
        deaths += killed(lambda folder=folder: harvest(folder), after)
        harvest(folder)
        assert contents(folder) == want
    assert deaths > 5


def test_a_kill_in_the_middle_of_a_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was half written when the process died is gone when the harvest is complete."""
    harvest(tmp_path / "whole")
    replace, child = Path.replace, os.fork()
    if not child:

        def killed_before(self: Path, target: Path) -> Path:
            if target.name == "harvest.json":
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", killed_before)
        harvest(tmp_path / "acts")
    os.waitpid(child, 0)
    assert [path.name.rpartition(".")[0] for path in (tmp_path / "acts").glob(".h*")] == [".harvest.json"]
    harvest(tmp_path / "acts")
    assert contents(tmp_path / "acts") == contents(tmp_path / "whole")


def test_unfinished_files_of_a_killed_process_are_cleared_away(tmp_path: Path) -> None:
    """What was not whole yet when a process died is gone once the harvest is complete, in every folder."""
    torch.set_num_threads(1)
    harvest(tmp_path / "whole")
    assert killed(lambda: harvest(tmp_path / "acts"), 20)
    for name in ("manifest/.part-000001.json.0a1b2c3d", "statistics/.part-000001.safetensors.0a1b2c3d"):
        (tmp_path / "acts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "acts" / name).write_bytes(b"")
    harvest(tmp_path / "acts")
    assert contents(tmp_path / "acts") == contents(tmp_path / "whole")


def test_killed_again_and_again(tmp_path: Path) -> None:
    """A harvest that dies after every few writes gets to its end, and every row is there once."""
    torch.set_num_threads(1)
    harvest(tmp_path / "whole")
    deaths = 0
    while killed(lambda: harvest(tmp_path / "acts"), 9):
        deaths += 1
    assert deaths > 5
    assert contents(tmp_path / "acts") == contents(tmp_path / "whole")


def test_going_on_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A call that goes on says how much was there; one that finds all done says so."""
    killed(lambda: harvest(tmp_path / "acts"), 20)
    done = len(tt.open_harvest(tmp_path / "acts").entries)
    assert done
    harvest(tmp_path / "acts", progress=True)
    assert f"{done} parts committed before; going on" in capsys.readouterr().err
    harvest(tmp_path / "acts", progress=True)
    assert "complete already" in capsys.readouterr().err


def test_what_was_done_is_not_done_again(tmp_path: Path) -> None:
    """Batches of committed parts are not run again."""
    killed(lambda: harvest(tmp_path / "acts"), 25)
    committed = len(tt.open_harvest(tmp_path / "acts").entries)
    model = make_model()
    harvest(tmp_path / "acts", model)
    assert committed > 2
    assert model.blocks[0].calls == 6 - committed


@pytest.mark.parametrize("what", ["model", "data", "options"])
def test_a_changed_harvest_is_refused(what: str, tmp_path: Path) -> None:
    """Another model, data set or option is refused with both fingerprints, and nothing is touched."""
    acts = harvest(tmp_path / "acts")
    before = contents(tmp_path / "acts")
    model, data, options = make_model(), make_data(24), {"shard_size": 700, "spread": 2} | OPTIONS
    if what == "model":
        with torch.no_grad():
            model.head.bias[3] += 1e-3
    elif what == "data":
        data[8]["input_ids"] = data[8]["input_ids"][::-1].copy()
        data = data[:-1]
    else:
        options["dtype"] = "f16"
    with pytest.raises(HarvestError, match=rf"fingerprint of the {what} is {acts.plan.fingerprints[what]}, now it is"):
        tt.harvest(model, data, "blocks.0", "blocks.1", to=tmp_path / "acts", **options)
    assert contents(tmp_path / "acts") == before
    assert tt.harvest(model, data, "blocks.0", to=tmp_path / "acts", **options, overwrite=True).sites == [
        "blocks.0:output"
    ]


def test_overwriting_removes_nothing_before_the_call_is_known_to_be_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt site or mask, wrong inputs, empty data or a plan that fails leave the harvest before as it was."""
    acts, data, calls = tmp_path / "acts", make_data(4), OPTIONS | {"overwrite": True}
    tt.harvest(make_model(), data, "blocks.0", to=acts, **calls)
    before = contents(acts)
    for site, given, wrong in (
        ("blocks.7", data, {}),
        ("blocks.0", data, {"keep": tt.tokens(mask="mask")}),
        ("blocks.0", data, {"inputs": ["tokens"]}),
        ("blocks.0", [], {}),
        ("blocks.0", data, {"spread": "8"}),
    ):
        with pytest.raises(tt.TensortapError):
            tt.harvest(make_model(), given, site, to=acts, **(calls | wrong))
        assert contents(acts) == before
    monkeypatch.setattr(sys.modules["tensortap.harvest.run"], "cut_into_parts", lambda *sizes: sizes[9])
    with pytest.raises(IndexError):
        tt.harvest(make_model(), data, "blocks.0", to=acts, **calls)
    assert contents(acts) == before


def test_overwriting_removes_what_is_a_harvests_and_nothing_else(tmp_path: Path) -> None:
    """Files of the user's in a folder of the same name stay, whether there was a harvest before or not."""
    acts = tmp_path / "acts"
    mine = [acts / "data" / "raw.csv", acts / "data" / "blocks.0-output" / "notes.txt", acts / "statistics" / "my.json"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    for _ in range(2):
        tt.harvest(make_model(), make_data(4), "blocks.0", "blocks.1", to=acts, **OPTIONS, overwrite=True)
    found = tt.harvest(make_model(), make_data(4), "blocks.1", to=acts, **OPTIONS, overwrite=True)
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert sorted(map(str, (acts / "data").rglob("*.parquet"))) == sorted(found.files())
    assert not [path for path in acts.iterdir() if path.name in ("manifest", ".partial")]


@pytest.mark.parametrize("after", range(6))
def test_killed_while_it_overwrites(after: int, tmp_path: Path) -> None:
    """Killed while the harvest before is removed, a call without overwrite=True never takes the rest for complete."""
    tt.harvest(make_model(), make_data(4), "blocks.0", to=tmp_path / "acts", **OPTIONS)
    want = contents(tmp_path / "acts")

    def again(**options: Any) -> None:
        tt.harvest(make_model(), make_data(4), "blocks.0", to=tmp_path / "acts", **OPTIONS, **options)

    assert killed(lambda: again(overwrite=True), 2 + after)
    again()
    assert contents(tmp_path / "acts") == want


def test_overwriting_removes_nothing_where_the_engine_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ray, with an engine that raises as it starts, or is none, the harvest before stays as it was."""

    class Broken(Processes):
        def prepare(self, job: object, source: object) -> None:
            raise ConnectionError("no cluster")

    acts, data, calls = tmp_path / "acts", make_data(4), OPTIONS | {"overwrite": True}
    tt.harvest(make_model(), data, "blocks.0", to=acts, **calls)
    before = contents(acts)
    monkeypatch.setitem(sys.modules, "ray", None)
    engines: list[tuple[Any, type[Exception]]] = [
        (tt.Ray(workers=2), MissingExtraError), (Broken(World(0, 1)), ConnectionError), ("ray", HarvestError),
        (3, HarvestError), (tt.Ray, HarvestError),
    ]  # fmt: skip
    for engine, error in engines:
        with pytest.raises(error):
            tt.harvest(make_model(), data, "blocks.0", to=acts, engine=engine, **calls)
        assert contents(acts) == before


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"workers": "two"}, {"num_cpus": -1}, {"num_gpus": "all"}])
def test_options_of_ray_are_checked_when_they_are_given(wrong: dict[str, Any]) -> None:
    """Workers, processors and GPUs must be numbers that Ray can use."""
    with pytest.raises(HarvestError, match=f"{next(iter(wrong))} must be"):
        tt.Ray(**wrong)


def test_a_generator_can_be_harvested(tmp_path: Path) -> None:
    """Batches that come only once are enough, and a function that makes them is enough to go on."""

    def batches() -> Any:
        return (torch.full((2, 3), float(i)) for i in range(30))

    whole = tt.harvest(
        nn.Identity(), batches(), ":output", to=tmp_path / "once", shard_size=50, spread=1, progress=False
    )
    assert whole.rows == 60
    options: dict[str, Any] = {"shard_size": 50, "spread": 1, "progress": False}
    assert killed(lambda: tt.harvest(nn.Identity(), batches, ":output", to=tmp_path / "again", **options), 30)
    tt.harvest(nn.Identity(), batches, ":output", to=tmp_path / "again", **options)
    assert contents(tmp_path / "again") == contents(tmp_path / "once")


class Drawing(nn.Module):
    """Draws numbers before its first layer and behind it, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x) + random.random() + float(np.random.rand())
        return self.fc(x + noise) + torch.rand(3)


def test_what_a_model_draws_depends_on_the_batch_alone(tmp_path: Path) -> None:
    """A model that draws random numbers gives the same bytes with stop="auto", killed, and after other batches."""
    torch.set_num_threads(1)
    data = [torch.ones(2, 3) for _ in range(12)]
    options: dict[str, Any] = {"shard_size": 24, "spread": 1, "progress": False}
    whole = tt.harvest(Drawing(), data, "fc", to=tmp_path / "whole", stop=None, **options)
    state = random.getstate()
    tt.harvest(Drawing(), data, "fc", to=tmp_path / "left", **options)
    assert random.getstate() == state
    assert killed(lambda: tt.harvest(Drawing(), data, "fc", to=tmp_path / "killed", **options), 20)
    tt.harvest(Drawing(), data, "fc", to=tmp_path / "killed", **options)
    assert contents(tmp_path / "whole") == contents(tmp_path / "left") == contents(tmp_path / "killed")
    assert len({tuple(row) for batch in whole.batches(64) for row in batch.values.tolist()}) == 24
    other = tt.harvest(Drawing(), data, "fc", to=tmp_path / "seed", seed=1, **options)
    assert not np.array_equal(next(other.batches(64)).values, next(whole.batches(64)).values)


class Deadly(nn.Module):
    """Kills its process when a sample holds 7."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 7).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2


def test_a_sample_that_kills_its_worker_is_set_aside(tmp_path: Path) -> None:
    """After three tries by itself the sample is named, counted and left out; all others are there."""
    data = list(np.arange(40, dtype=np.float32).reshape(-1, 1))
    options: dict[str, Any] = {"batch_size": 4, "shard_size": 16, "spread": 1, "progress": False}
    deaths = 0
    while killed(lambda: tt.harvest(Deadly(), data, ":output", to=tmp_path / "acts", **options), 10**9):
        deaths += 1
        assert deaths < 10
    acts = tt.open_harvest(tmp_path / "acts")
    assert deaths == 5
    assert [each["sample"] for each in acts.set_aside] == [7]
    assert sorted(int(s) for batch in acts.batches(8) for s in batch.sample) == [i for i in range(40) if i != 7]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is named, what is committed stays, and the same call goes on when there is room."""
    publish, left = HarvestFolder.publish, [7]

    def full(self: HarvestFolder, *args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        publish(self, *args)

    monkeypatch.setattr(HarvestFolder, "publish", full)
    with pytest.raises(HarvestError, match="is full: what is committed stays"):
        harvest(tmp_path / "acts")
    assert tt.open_harvest(tmp_path / "acts").rows > 0
    monkeypatch.undo()
    harvest(tmp_path / "acts")
    harvest(tmp_path / "whole")
    assert contents(tmp_path / "acts") == contents(tmp_path / "whole")
