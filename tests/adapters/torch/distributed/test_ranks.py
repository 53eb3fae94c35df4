"""Models trained by several processes: what each rank records, and what it leaves alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensortap as tt

COUNTS = ("numel", "nan", "posinf", "neginf", "zeros", "min", "max")
MOMENTS = ("mean", "std", "l1", "l2")

Play = Callable[[int, str], Any]
SCENES = [
    *((2, name) for name in ("ddp", "inner", "fsdp", "tensors", "gpipe", "1f1b")),
    (4, "grid"),
    *(pytest.param(4, name, marks=pytest.mark.thorough) for name in ("hybrid", "tensors", "ddp", "fsdp", "1f1b")),
]
scenes = pytest.mark.parametrize(("ranks", "name"), SCENES)


@scenes
def test_no_collective_is_added_or_moved(play: Play, ranks: int, name: str) -> None:
    """On every rank the process groups are called for the same, in the same order, with and without taps."""
    for result in play(ranks, name).results:
        assert result["collectives"] and result["with taps"] == result["collectives"]


@scenes
def test_training_is_the_same(play: Play, ranks: int, name: str) -> None:
    """Every rank ends with the same bits in its parameters as without taps."""
    for result in play(ranks, name).results:
        bare, tapped = result["bits"]
        assert bare == tapped


@scenes
def test_every_rank_records_its_part_of_one_run(play: Play, ranks: int, name: str) -> None:
    """One run, finished, with every rank's rows at the same steps, and nothing dropped or gone wrong."""
    run = play(ranks, name).run
    assert run.ranks == list(range(ranks)) and run.state == "finished"
    assert not set(run.counts) - {"unseen"}
    table = run.table(columns=["rank", "step"])
    for rank in range(ranks):
        assert {row["step"] for row in table.to_pylist() if row["rank"] == rank} == {0, 1, 2}


def merged(run: tt.Run, **more: Any) -> dict[str, dict[str, Any]]:
    rows = run.merged("ranks", **more).to_pylist()
    return {
        f"{row['step']} {row['site']}:{row['port']}{row['slot']} {row['call']}": row
        for row in rows
        if not row["recomputed"]
    }


def wrong(row: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """In what a merged row differs from the statistics of the whole."""
    exact = [name for name in COUNTS if row[name] != whole[name]]
    scale = {"mean": max(abs(whole["mean"]), whole["std"])}  # a mean near zero is a small rest of large sums
    off = [name for name in MOMENTS if not _close(row[name], whole[name], scale.get(name, abs(whole[name])))]
    hist = [] if row["hist_counts"] == whole["hist_counts"] else ["hist_counts"]
    return exact + off + hist


def _close(a: float, b: float, scale: float) -> bool:
    return math.isclose(a, b, rel_tol=0.0, abs_tol=1e-6 * scale)  # float32 is summed as float32 within a block


# Plain tensors between tensor-parallel layers say nothing of themselves: the user must.
PLAIN = ["embed:output", "blocks.*.norm:output", "head:output"]
SAME: dict[str, Any] = {"tensors": PLAIN, "grid": {"tp": PLAIN}}


@scenes
def test_merged_over_ranks_is_the_gathered_tensor(play: Play, ranks: int, name: str) -> None:
    """Folded over ranks, rows have the statistics of the gathered tensors: counts exact, moments to rounding."""
    played = play(ranks, name)
    rows = merged(played.run, replicated=SAME.get(name))
    seen = {place: summary for result in played.results for place, summary in result["whole"].items()}
    whole = {_as_watched(place, name): summary for place, summary in seen.items()}
    assert whole and not [place for place in whole if place not in rows]
    bad = {place: wrong(rows[place], summary) for place, summary in whole.items()}
    assert not {place: names for place, names in bad.items() if names}


def _as_watched(place: str, name: str) -> str:
    """By hand every name is the wrapper's."""
    step, site, call = place.split(" ")
    if name == "inner":
        site = site.removeprefix("module.")
    return f"{step} {site} {call}"


@pytest.mark.parametrize(
    ("ranks", "name", "place", "mesh", "placements"),
    [
        (2, "ddp", "module.embed.weight:param", {"ddp": 2}, ["R"]),
        (2, "inner", "embed.weight:grad", {"ddp": 2}, ["R"]),
        (2, "fsdp", "embed.weight:grad", None, ["S(0)"]),
        pytest.param(
            4, "hybrid", "embed.weight:update", {"copies": 2, "shards": 2}, ["R", "S(0)"], marks=pytest.mark.thorough
        ),
        (2, "tensors", "blocks.0.fc2.weight:param", {"tp": 2}, ["S(1)"]),
        (2, "tensors", "embed.weight:param", {"tp": 2}, ["R"]),  # a plain one beside DTensors
        pytest.param(4, "tensors", "blocks.0.fc2.weight:param", {"tp": 4}, ["S(1)"], marks=pytest.mark.thorough),
        pytest.param(4, "tensors", "embed.weight:param", {"tp": 4}, ["R"], marks=pytest.mark.thorough),
        (4, "grid", "embed.weight:param", {"dp": 2, "tp": 2}, ["S(0)", "R"]),  # sharded along one side only
        (4, "local parts", "module.blocks.0.fc1.weight:grad", {"dp": 2, "tp": 2}, ["R", "S(0)"]),  # no DTensor
        (4, "local parts", "module.blocks.1.fc2.weight:update", {"dp": 2, "tp": 2}, ["R", "S(1)"]),
        (4, "local parts", "module.embed.weight:param", {"dp": 2, "tp": 2}, ["R", "R"]),
        (2, "tensors", "blocks.0.fc1:output", {"tp": 2}, ["S(1)"]),  # a local tensor
        (2, "tensors", "blocks.0.fc2:grad_output", {"tp": 2}, ["R"]),
        (2, "tensors", "blocks.1.fc1:output", {"tp": 2}, ["S(1)"]),  # a DTensor
    ],
)
def test_the_part_of_a_record_can_be_found(
    play: Play, ranks: int, name: str, place: str, mesh: dict[str, int] | None, placements: list[str]
) -> None:
    """Mesh, place on it and placements are with the run, for each rank."""
    parts = [of[place] for of in play(ranks, name).run.parts.values()]
    assert len(parts) == ranks and len({tuple(part["at"]) for part in parts}) == ranks
    for part in parts:
        assert part["placements"] == placements and (mesh is None or part["mesh"] == mesh)


def test_parameters_that_ddp_holds_as_local_parts(play: Play) -> None:
    """DDP over tensor parallelism: a module computes with a DTensor, its local parameter is recorded in every step."""
    played = play(4, "local parts")
    for rank, result in enumerate(played.results):
        assert result["kept"] == "DTensor"
        rows = [row for row in played.run.table("module.blocks.0.fc1.weight:*").to_pylist() if row["rank"] == rank]
        assert [(row["step"], row["port"]) for row in rows] == [
            (step, port) for step in (0, 1) for port in ("param", "grad", "update")
        ]
        gradient, weight = result["gradient and weight"]
        assert rows[4]["l2"] == pytest.approx(gradient) and rows[3]["l2"] == pytest.approx(weight, rel=0.1)


def test_recomputed_activations_are_told_apart(play: Play) -> None:
    """Under FSDP2 with activation checkpointing each block's rows come twice, the second time marked, on every rank."""
    rows = play(2, "fsdp").run.table("blocks.*.fc1:output").to_pylist()
    for rank in range(2):
        marks = [row["recomputed"] for row in rows if row["rank"] == rank]
        assert marks.count(True) == marks.count(False) == 2 * 2 * 3  # blocks, micro-batches, steps


@pytest.mark.parametrize(
    ("ranks", "name"), [(2, "gpipe"), (2, "1f1b"), pytest.param(4, "1f1b", marks=pytest.mark.thorough)]
)
def test_stages_have_sites_of_their_own(play: Play, ranks: int, name: str) -> None:
    """Each rank has its stage's names, its own module tree, and the microbatches of a step as calls of it."""
    run = play(ranks, name).run
    for rank in range(ranks):
        rows = [row for row in run.table().to_pylist() if row["rank"] == rank]
        assert {row["site"].split(".")[0] for row in rows} == {f"stage{rank}"}
        calls = [(row["step"], row["call"]) for row in rows if (row["site"], row["port"]) == (f"stage{rank}", "output")]
        assert calls == [(step, call) for step in range(3) for call in range(4)]
        own = json.loads((Path(run.path) / f"rank={rank}/_rank.json").read_text()).get("model", run.info["model"])
        assert own["modules"][1]["path"] == f"stage{rank}"
