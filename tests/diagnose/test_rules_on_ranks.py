"""Rules on ranks: replicas that part, and a rank whose values are apart from all others'."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tt
from tensortap.types import Place

GENERATOR = np.random.default_rng(0)
W, V = (GENERATOR.normal(size=(6, 5)).astype(np.float32) for _ in range(2))
ONES = np.ones(5, np.float32)


@pytest.fixture
def ranks(make_run):
    """Write a run: for each rank the arrays of its steps."""

    def write(*ranks):
        for rank, steps in enumerate(ranks):
            path = make_run([(step, {}) for step in steps], rank=rank)
        return tt.open(path)

    return write


def same(step: int) -> dict[str, np.ndarray]:
    """What every replica has at a step."""
    return {"a.w:param": W + step, "b.w:param": V - step, "n.w:param": ONES + step, "a.w:grad": W * 2}


def test_one_bit_on_one_rank(ranks):
    """The step, the parameter and the rank that differs from the majority are named, and not what follows."""
    flipped = same(1)
    flipped["a.w:param"] = flipped["a.w:param"].copy()
    flipped["a.w:param"].view(np.int32)[0, 0] ^= 1 << 4
    later = {name: array * 1.1 for name, array in same(2).items()}
    found = ranks(*([same(0), same(1), same(2)] for _ in range(2)), [same(0), flipped, later]).findings(
        "replicas_differ"
    )
    assert [(f.site, f.steps.first, f.evidence["rank"]) for f in found] == [("a.w:param", 1, 2)]
    assert found[0].evidence["majority"] and found[0].severity == "error"


def test_replicas_that_agree(ranks):
    """There is no finding."""
    assert not ranks(*([same(0), same(1)] for _ in range(3))).findings("replicas_differ")


def test_shards_are_no_replicas(ranks):
    """Ranks that began with other parameters hold pieces, though norms and zeros are equal in the beginning."""
    pieces = [[{"a.w:param": W + rank, "b.w:param": V * (rank + 1), "n.w:param": ONES * (1 + step * rank)} for step in
               range(2)] for rank in range(2)]  # fmt: skip
    assert not ranks(*pieces).findings("replicas_differ")


def test_running_statistics_of_a_rank(ranks):
    """A buffer that ranks never shared is their own; one that they shared and then did not is found."""
    own = [[{**same(step), "bn.mean:buffer": V[0] * (rank + 1)} for step in range(2)] for rank in range(2)]
    assert not ranks(*own).findings("replicas_differ")


def test_an_average_that_one_rank_does_not_keep(ranks):
    """The buffer and the first step in which it differs are named."""
    average = [
        [{**same(step), "ema:buffer": V[0] * (1 + step * (rank == 0))} for step in range(3)] for rank in range(3)
    ]
    (found,) = ranks(*average).findings("replicas_differ")
    assert (found.site, found.steps.first, found.evidence["rank"]) == ("ema:buffer", 1, 0)


def test_a_rank_with_other_data(ranks):
    """A rank whose inputs are three times as large as all others' is named; ranks that merely vary are not."""

    def steps(size: float) -> list[dict[str, np.ndarray]]:
        return [{**same(0), "fc:output": GENERATOR.normal(size=(40, 5)) * size} for _ in range(4)]

    assert not ranks(*(steps(1.0) for _ in range(4))).findings("rank_outlier")


def test_the_rank_with_other_data_is_named(ranks):
    """Its number and how much larger its values are."""
    runs = [
        [{**same(0), "fc:output": GENERATOR.normal(size=(40, 5)) * size} for _ in range(4)] for size in (1, 1, 3, 1)
    ]
    (found,) = ranks(*runs).findings("rank_outlier")
    assert found.evidence["rank"] == 2 and found.evidence["ratio"] == pytest.approx(3, rel=0.2)


@pytest.mark.parametrize("own", [True, False])
def test_ranks_with_other_positions_are_not_compared(ranks, own):
    """Ranks that are given other positions, the same in every step, have other tokens of a row, and other values."""
    tokens, positions = (Place("", "input", slot) for slot in ("[0]", "[1]"))
    runs = [
        [
            {**same(0), tokens: W + n, positions: np.arange(8) + 8 * rank * own,
             "fc:output": GENERATOR.normal(size=(40, 5)) * (1 if rank else 3)}
            for n in range(4)
        ]
        for rank in range(4)
    ]  # fmt: skip
    assert bool(ranks(*runs).findings("rank_outlier")) == (not own)


def test_one_rank_cannot_differ(ranks):
    """The rule says why it did not look."""
    assert "only one rank" in ranks([same(0)]).findings("replicas_differ").skipped["replicas_differ"]
