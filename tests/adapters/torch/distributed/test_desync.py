"""The trigger `desync`: ranks that post their hashes beside the run, and those that share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensortap as tt
from tensortap.distributed.hash_board import SLOTS, HashBoard
from tensortap.errors import ProbeError
from tensortap.record.global_stats import check

HASHES = tt.probe("**:param", "**:update", keep=[tt.stats(), tt.hash()])
DETAIL = tt.probe("**", keep=tt.stats(), when=tt.desync())


class Rank:
    """One of several ranks of a data-parallel training, all in this process."""

    def __init__(self, rank: int, to: Path, *probes: tt.Probe, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.tap = tt.watch(self.model, *(probes or (HASHES, DETAIL)), to=to, rank=rank, strict=True, **more)

    def step(self, *, flip: bool = False, skip: bool = False) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()
        if not skip:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.tap.step()
        if flip:
            self.model[2].weight.data.view(torch.int32)[1, 2] ^= 1


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make so many ranks of one run."""
    made: list[Rank] = []

    def make(size: int, *probes: tt.Probe, **more: Any) -> list[Rank]:
        monkeypatch.setenv("WORLD_SIZE", str(size))
        made.extend(Rank(rank, tmp_path / "run", *probes, **more) for rank in range(size))
        return made

    yield make
    for rank in made:
        rank.tap.close()


def reasons(path: Path) -> dict[tuple[int, int], str]:
    """Why the outputs were kept, by rank and step."""
    rows = tt.open(path).table(columns=["rank", "step", "port", "reason"]).to_pylist()
    return {(row["rank"], row["step"]): row["reason"] for row in rows if row["port"] == "output"}


def test_a_flipped_bit_is_seen_without_a_message(ranks, tmp_path: Path) -> None:
    """The last rank to close a step sees it then, the others in the next one; look-back keeps the step before."""
    three = ranks(3, lookback=1)
    for number in range(5):
        for n, rank in enumerate(three):
            rank.step(flip=number == 1 and n == 1)
    for rank in three:
        rank.tap.close()
    found = reasons(tmp_path / "run")
    said = "desync(): 2.weight:param on rank 1 differs from rank 0, 2"
    assert set(found) == {(0, 2), (0, 3), (1, 2), (1, 3), (2, 1), (2, 2)}
    assert found[2, 2].startswith(said) and found[2, 2].endswith("at step 2") and found[2, 1].startswith("lookback: ")
    assert found[0, 3].startswith(said) and found[0, 2].startswith("lookback: ")


def test_a_step_that_one_rank_skips(ranks, tmp_path: Path) -> None:
    """A rank without an update where the others have one is not their replica any more; the rule says the same."""
    two = ranks(2, HASHES, DETAIL)
    for number in range(3):
        for n, rank in enumerate(two):
            rank.step(skip=number == 1 and n == 1)
    for rank in two:
        rank.tap.close()
    assert "0.weight:update on rank 1 differs from rank 0" in reasons(tmp_path / "run")[1, 1]
    (first, *_) = tt.open(tmp_path / "run").findings("replicas_differ")
    assert (first.site, first.steps.first, first.evidence["rank"]) == ("0.weight:update", 1, 1)
    assert "rank 1 has none, rank 0 has" in first.message


@pytest.mark.xdist_group("ranks")
def test_live_with_global_stats(play) -> None:
    """Hashes go with the one all-reduce there is, and every rank sees the difference in the step itself."""
    played = play(2, "apart")
    found = reasons(played.path)
    assert set(found) == {(0, 1), (0, 2), (1, 1), (1, 2)}
    said = "desync(): 1.weight:param on rank 1 differs from rank 0 at step 2"
    assert {found[0, 2], found[1, 2]} == {said} and found[0, 1] == f"lookback: {said}"
    assert [len(result["calls"]) for result in played.results] == [5, 5]  # one to agree at first, one a step


def test_one_process_has_nothing_to_compare(tmp_path: Path) -> None:
    """The same script on one process records nothing more, and does not fail."""
    one = Rank(0, tmp_path / "run")
    for _ in range(2):
        one.step(flip=True)
    one.tap.close()
    assert not reasons(tmp_path / "run")


def test_wrong_use() -> None:
    """Without hashes there is nothing to compare; `every` must be a number; others may go with global_stats."""
    with pytest.raises(ProbeError, match=r"add probe\('\*\*:param'"):
        tt.watch(torch.nn.Linear(2, 2), tt.probe("**", when=tt.every(2) | ~tt.desync()))
    with pytest.raises(ProbeError, match=r"desync\(every=10\)"):
        tt.desync(every=0)
    with pytest.raises(ProbeError, match="global_stats=True cannot go with"):
        check([tt.probe("**", when=tt.desync() | (tt.metric("loss") > 1))], model=True, all_ranks=True, budget=False)
    later = tt.following(tt.desync(every=3), 2)
    assert later.compares_replicas and str(later) == "following(desync(every=3), 2)"


def test_what_is_posted(tmp_path: Path) -> None:
    """A slot holds its step until another takes it; half of one, and one of another launch, are as good as none."""
    boards = [HashBoard(lambda rank: tmp_path / f"{rank}/_hashes", rank, "now") for rank in (0, 1)]
    assert boards[1].read(0, 3) is None
    for step in (3, 3 + SLOTS):
        boards[0].post(step, np.full((5, 4), step))
        assert boards[1].read(0, 3).step == step
    boards[0].post(4, np.full((50, 4), 4))  # more rows than there was room for: a new file
    assert boards[1].read(0, 4).rows.shape == (50, 4) and boards[1].read(0, 3) is None
    assert HashBoard(lambda rank: tmp_path / f"{rank}/_hashes", 2, "before").read(0, 4) is None
    file = tmp_path / "0/_hashes"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 4 + 200])  # in the middle of the slot
    assert boards[1].read(0, 4) is None
