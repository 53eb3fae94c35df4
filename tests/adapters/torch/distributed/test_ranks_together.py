"""Ranks of one launch: who records, where to, what they share, what one of them does when another dies."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.errors import ProbeError, UnsupportedError

Play = Callable[[int, str], Any]


def test_an_added_collective_is_noticed(play: Play) -> None:
    """The count that proves that taps add none sees one that a reducer adds, on every rank."""
    for result in play(2, "planted").results:
        assert len(result["tapped"]) == len(result["bare"]) + 2  # one for each micro-batch


@pytest.mark.parametrize("name", ["dtensors", "forked"])
def test_dtensors_are_read_where_they_are(play: Play, name: str) -> None:
    """Outputs without a graph, a NaN on one rank, and gradients that are added up cause no collective."""
    for result in play(2, name).results:
        assert result["bare"] and result["tapped"] == result["bare"]


def test_an_origin_among_ranks_names_the_module_alone(play: Play) -> None:
    """Where running a module again would communicate, it is not run; that its operation is unknown is counted."""
    other, maker = play(2, "dtensors").results
    assert maker["origins"] == [["blocks.1.fc1", "", "its parameter weight is not finite"]]
    assert other["origins"] == [["blocks.1.fc2", "", ""]]  # what it received is not finite
    assert other["counts"]["origins_without_operation"] == 1
    assert all("modules_run_again" not in result["counts"] for result in (other, maker))


def test_parts_are_known_without_a_graph(play: Play) -> None:
    """In inference, copies and pieces that tensor-parallel layers return as plain tensors are told apart."""
    rows = {row["site"]: row["numel"] for row in play(2, "dtensors").run.merged("ranks").to_pylist()}
    assert rows["blocks.0.fc1"] == 3 * 12 and rows["blocks.0.fc2"] == rows["blocks.1.fc2"] == 3 * 6


def test_a_parameter_that_is_not_sharded_now_is_recorded_as_its_shard(play: Play) -> None:
    """After a forward alone FSDP2 has whole parameters in place; ranks still record their shards."""
    played = play(2, "evaluated")
    assert played.results[0]["whole"] == "Parameter"
    rows = {row["site"]: row for row in played.run.merged("ranks").to_pylist()}
    assert rows["embed.weight"]["numel"] == 30 and rows["embed.weight"]["records"] == 2


def test_the_chosen_rank_records(play: Play) -> None:
    """With ranks=1 rank 0 puts no hook on and writes nothing, and its tap does all that a tap does."""
    played = play(2, "chosen")
    idle, busy = played.results
    assert busy["hooks"] and not idle["hooks"] and idle["counts"] == {}
    assert idle["path"] == busy["path"] and idle["ranks"] == busy["ranks"] == [1]
    assert not (played.path / "rank=0").exists() and idle["steps"] == [0, 1]
    assert "named/value:output" in played.run.sites


def test_ranks_agree_on_a_new_folder(play: Play) -> None:
    """Where nobody says where, ranks write to one folder, to another the next time, and find that of others."""
    first, second = play(2, "agreed").results
    assert first["paths"] == second["paths"] and len(set(first["paths"])) == 3
    assert first["ranks"] == [[0, 1], [0, 1], [0]]


def test_ranks_that_nobody_launched(ranks_folder: Path) -> None:
    """Processes that torch.multiprocessing started share a run, the one named and the one agreed on."""
    out = ranks_folder / "spawned"
    (agreed,) = (out / "runs").glob("2*")
    assert tt.open(out / "run").ranks == tt.open(agreed).ranks == [0, 1]


def test_a_rank_that_runs_out_of_batches(play: Play) -> None:
    """Under join() each rank has as many steps as it had batches, numbered alike."""
    table = play(2, "uneven").run.table("module.0").to_pylist()
    assert [[r["step"] for r in table if r["rank"] == rank] for rank in (0, 1)] == [[0, 1], [0, 1, 2]]


def test_global_statistics_ride_on_one_all_reduce(play: Play) -> None:
    """On observed steps one all-reduce gives every rank what folding the run over ranks and calls gives later."""
    played = play(2, "shared")
    first, second = played.results
    assert first["found"] == second["found"] and [found["step"] for found in first["found"]] == [0, 0, 2]
    # One to agree, then of three steps: reduced gradients in each, statistics in the first and the last.
    assert [call.split()[0] for call in first["calls"]].count("c10d::allreduce_") == 1 + 3 + 2
    later = {f"{row['site']}:{row['port']}": row for row in played.run.merged(["ranks", "calls"], steps=0).to_pylist()}
    now = first["found"][0]["rows"]
    assert set(now) == set(later)
    for place, row in now.items():
        # The skewness and kurtosis of a constant are not defined: null in a table, NaN as a number.
        folded = {name: math.nan if later[place][name] is None else later[place][name] for name in row}
        assert folded == pytest.approx(row, nan_ok=True)


def test_a_paused_rank_takes_part_with_nothing(play: Play) -> None:
    """The others get their statistics, and nobody waits for ever."""
    found = play(2, "shared").results[0]["found"]
    assert found[2]["rows"]["module.head:output"]["numel"] * 2 == found[0]["rows"]["module.head:output"]["numel"]


def test_ranks_that_watch_different_places_do_not_share(play: Play) -> None:
    """Every rank is told, instead of waiting for rows that never come."""
    for rank, result in enumerate(play(2, "refused").results):
        assert f"rank {1 - rank} watches" in result["said"]


def test_the_rank_of_a_nan_is_named(play: Play) -> None:
    """The finding leads to the rank that made it, though reduced gradients carry it to all in the same step."""
    for result in play(2, "nan").results:
        assert result["site"] == "module.1:output" and result["where"] == {"step": 1, "rank": 1}
        assert "first at step 1 on rank 1" in result["text"]
    assert play(2, "nan").results[1]["told"][0] == "module.1"


@pytest.mark.thorough  # `make kills` kills ranks, test_killed.py one process
def test_one_rank_is_killed(torchrun: Callable[..., Any], tmp_path: Path) -> None:
    """SIGKILL on rank 1 in its fourth step: its three closed steps are there, and the other rank's too."""
    torchrun(tmp_path, 2, "killed.py", check=False)
    run = tt.open(tmp_path / "run")
    assert run.state == "crashed" and run.ranks == [0, 1]
    table = run.table("module.0:output").to_pylist()
    assert [row["step"] for row in table if row["rank"] == 1] == [0, 1, 2]
    assert {0, 1, 2} <= {row["step"] for row in table if row["rank"] == 0}
    copies = run.merged("ranks", sites="module.0.weight:param", steps=2).to_pylist()
    assert copies[0]["numel"] == 12 and copies[0]["records"] == 1


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (1, r"got 1: this process is alone, write ranks=0"), (-1, "got -1"), (True, r"must be a number"),
        ("0", r"must be .* got '0': write ranks=0"), ([], r"at least one rank, got \[\]"),
        ([0, 0.5], r"got \[0, 0.5\]"),
        (lambda rank: True, r"must be \(rank, world\) -> bool"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_meant(ranks: Any, said: str) -> None:
    """The error names the value and what to write."""
    with pytest.raises(ProbeError, match=said):
        tt.watch(nn.Linear(2, 2), to=tt.Memory(), ranks=ranks)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"when": tt.metric("loss") > 1}, r"cannot go with when=metric\('loss'\) > 1"),
        ({"when": tt.every(2) & tt.nonfinite()}, "ranks that disagree"),
        ({"when": lambda step, seen: True}, "each rank"),
        ({"budget": 0.1}, "cannot go with budget="), ({"ranks": 0}, "needs every rank to record"),
    ],
)  # fmt: skip
def test_what_could_make_ranks_wait_for_each_other_is_refused(more: dict[str, Any], said: str) -> None:
    """Only triggers that the step's number decides may go with a collective."""
    probe = tt.probe("**", when=more.pop("when", None))
    with pytest.raises(ProbeError, match=said):
        tt.watch(nn.Linear(2, 2), probe, to=tt.Memory(), global_stats=True, **more)


def test_global_statistics_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have no process group yet are told to make one first."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match=r"PyTorch needs a process group, got none: call .*init_process_group"):
        tt.watch(nn.Linear(2, 2), to=tt.Memory(), global_stats=True)


def test_global_statistics_of_one_process() -> None:
    """A process that is alone has them as well, so that a script need not ask whether it is."""
    model = nn.Linear(2, 2)
    with tt.watch(model, tt.probe("", when=tt.every(2) | tt.at([1])), to=tt.Memory(), global_stats=True) as tap:
        assert tap.global_stats is None
        tap.step()
        model(torch.ones(3, 2))
        model(torch.full((3, 2), float("nan")))
        tap.step()
        assert tap.global_stats is not None and tap.global_stats.step == 1
        assert tap.global_stats[":output"]["nan"] == 6 and tap.global_stats[":output"]["numel"] == 12
