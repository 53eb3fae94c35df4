"""Processes of one launch write side by side into one run, and agree on its path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_python import WarmPython

from tensortap.distributed.shards import Shard
from tensortap.errors import RunError, RunExistsError
from tensortap.store.claim import launch_id
from tensortap.store.default_path import agreed_path, default_path
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run

# Every rank is a process of its own, and all are inside the run before any of them writes.
SCRIPT = """
import os, sys, numpy as np, tensortap as tt
ranks, to, *words = sys.argv[1:]
more = {"to": to} if to else {}
more |= {word: word in words for word in ("resume", "overwrite")}
inside, go = os.pipe(), os.pipe()

def rank_main(rank):
    os.environ["RANK"] = str(rank)
    with tt.watch(tt.probe("**", keep=[tt.stats(), tt.sample(2)]), **more) as tap:
        assert tap.recorder.rank == rank
        os.write(inside[1], b"x")
        assert os.read(go[0], 1)
        for step in range(30):
            tt.tap(np.full(4, 100 * rank + step, np.float32), "a")
            tap.step(loss=rank)
    print(tap.path, flush=True)

children = []
for rank in range(int(ranks)):
    child = os.fork()
    if not child:
        try:
            rank_main(rank)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    children.append(child)
os.close(inside[1])
for child in children:
    assert os.read(inside[0], 1), "a rank ended before it was inside the run"
os.write(go[1], b"x" * len(children))
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.fixture
def launch(warm_python: WarmPython, tmp_path: Path) -> Callable[..., list[str]]:
    """Run ranks at once, in `tmp_path`; return the paths they wrote to."""
    (tmp_path / "ranks.py").write_text(SCRIPT)

    def run(ranks: int, *words: str, port: str = "29500") -> list[str]:
        env = {"MASTER_PORT": port, "MASTER_ADDR": "localhost"}
        done = warm_python.run(["ranks.py", ranks, *(words or ("",))], tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


def rows(path: Any) -> list[tuple[int, int, float]]:
    return [(r["rank"], r["step"], r["mean"]) for r in open_run(path).table().to_pylist()]


def test_two_ranks_write_one_run_side_by_side(tmp_path: Path, launch: Callable[..., list[str]]) -> None:
    """Both ranks' rows, metrics and tensors are in one run, and each wrote only its own files."""
    launch(2, "exp1")
    run = open_run(tmp_path / "exp1")
    assert run.ranks == [0, 1] and run.state == "finished" and run.counts == {}
    assert sorted(rows(run.path)) == [(rank, step, 100.0 * rank + step) for rank in range(2) for step in range(30)]
    assert run.tensor("a", 3, rank=1).tolist() == [103.0, 103.0]
    with pytest.raises(RunError, match=r"rank=0.* or .*rank=1"):
        run.tensor("a", 3)
    assert run.merged("ranks").num_rows == 30
    assert json.loads((tmp_path / "exp1/run.json").read_text())["schema"] == 1


@pytest.mark.thorough  # test_ranks_overwrite_and_resume_together starts ranks at once
def test_ranks_agree_on_a_default_path(tmp_path: Path, launch: Callable[..., list[str]]) -> None:
    """With no path given, all ranks of a launch write to one new folder, and the next launch to another."""
    first, second = launch(3), launch(2)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
    assert first[0].startswith("runs/") and first[0].split("-", 2)[2].startswith("values")
    assert open_run(tmp_path / first[0]).ranks == [0, 1, 2]
    assert open_run(tmp_path / second[0]).ranks == [0, 1]


def test_ranks_overwrite_and_resume_together(tmp_path: Path, launch: Callable[..., list[str]]) -> None:
    """Ranks that overwrite at once begin one run anew; ranks that resume go on with it."""
    launch(2, "exp1", port="1")
    launch(2, "exp1", "overwrite", port="2")
    assert len(rows(tmp_path / "exp1")) == 60
    launch(2, "exp1", "overwrite", port="2")  # the same launch as far as anyone can tell
    assert len(rows(tmp_path / "exp1")) == 60
    launch(2, "exp1", "resume", port="3")
    assert [(rank, step) for rank, step, _ in sorted(rows(tmp_path / "exp1"))] == [
        (rank, step) for rank in range(2) for step in range(60)
    ]


def test_ranks_of_another_launch_do_not_join(tmp_path: Path) -> None:
    """A rank joins the run of its own launch, once, and no other's."""
    first = RunFolder(tmp_path / "run", rank=0, launch="one")
    RunFolder(tmp_path / "run", rank=1, launch="one").close()
    for rank, launched in ((0, "one"), (1, "one"), (2, "two")):
        with pytest.raises(RunExistsError):
            RunFolder(tmp_path / "run", rank=rank, launch=launched)
    first.close()


def test_a_launch_is_told_by_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with the same launcher's variables share an id; without any, each is alone."""
    for name in ("MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launch_id() != launch_id()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    one = launch_id()
    assert one == launch_id()
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert one != launch_id()


def test_a_default_path_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs begun in the same second have two folders."""
    monkeypatch.chdir(tmp_path)
    first = default_path("MLP", 0, clock=lambda: 0.0)
    RunFolder(first).close()
    second = default_path("MLP", 0, clock=lambda: 0.0)
    assert second == f"{first}-2" and first.endswith("-MLP")


def test_resumed_ranks_begin_at_the_same_step(tmp_path: Path) -> None:
    """A rank that resumes late begins where the first one did, not after what that one has written since."""
    path = tmp_path / "run"

    def begin(rank: int, launched: str, at: int) -> int:
        folder = RunFolder(path, rank=rank, launch=launched, resume=True, after=lambda: at)
        folder.close()
        return folder.start

    assert [begin(0, "one", 7), begin(1, "one", 9)] == [0, 0]  # a new run
    assert [begin(1, "two", 5), begin(0, "two", 8)] == [5, 5]
    assert [begin(0, "two", 11), begin(1, "two", 13)] == [11, 11]  # the same launcher on the same port once more


def test_spawned_ranks_are_told_by_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher's variables, processes that one parent started as ranks share an id."""
    for name in ("MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launch_id(spawned=True) == launch_id(spawned=True) != launch_id()


def test_a_fast_rank_does_not_mislead_a_slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that begins its second run before another begins its first still shares both with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "1")
    fast = []
    for turn in range(2):
        fast.append(default_path("MLP", 0, turn=turn))
        RunFolder(fast[-1], rank=0).close()
    slow = [default_path("MLP", 1, turn=turn) for turn in range(2)]
    assert slow == fast and agreed_path(turn=1) == fast[1] and agreed_path(turn=2) is None


def part(at: list[int], placements: list[str]) -> dict[str, Any]:
    mesh = {"dp": 2, "tp": 2}
    return Shard(mesh, tuple(at), tuple(placements), (4,), (0, 1, 2, 3)).as_json()


def test_copies_count_once_whoever_records(make_run: Any) -> None:
    """Of ranks that hold the same piece the first that is there counts; partial sums are marked, copies by word too."""
    for rank in (1, 2, 3):
        path = make_run([({"w": np.full(4, float(rank)), "x": np.ones(2), "s": np.ones(1)}, {})], rank=rank)
        file = Path(path) / f"rank={rank}/_rank.json"
        state = json.loads(file.read_text())
        at = [rank // 2, rank % 2]
        state["parts"] = {"w:output": part(at, ["S(0)", "R"]), "s:output": part(at, ["P(sum)", "S(0)"])}
        file.write_text(json.dumps(state))
    run = open_run(path)
    rows = {row["site"]: row for row in run.merged("ranks", replicated="x").to_pylist()}
    assert rows["w"]["numel"] == 8 and rows["w"]["mean"] == 1.5  # ranks 1 and 2; rank 3 has what rank 2 has
    assert rows["x"]["numel"] == 2 and run.merged("ranks", sites="x").to_pylist()[0]["numel"] == 6
    assert [rows[name]["summands"] for name in "wxs"] == [False, False, True]
    assert run.series("w", "mean").values.tolist() == [1.5] and run.series("w", "mean", rank=3).values.tolist() == [3.0]
    beside = run.merged("ranks", sites="x", replicated={"tp": "x"}).to_pylist()[0]
    assert beside["numel"] == 4  # ranks 1 and 2; rank 3 lies beside rank 2
    with pytest.raises(RunError, match=r"got 'pp', which no mesh in this run has\. There are dp, tp\."):
        run.merged("ranks", replicated={"pp": "x"})
