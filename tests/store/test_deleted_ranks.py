"""Runs of several ranks of which one rank's files were deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import tensortap as tt
from tensortap.distributed.shards import Shard
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.store.folder import RunFolder
from tensortap.types import Place

RANKS, STEPS = 3, 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run whose ranks hold copies of one tensor, and say so."""
    for rank in range(RANKS):
        recorder = Recorder([tt.probe("**")], rank=rank)
        recorder.names.parts[Place("a")] = Shard({"dp": RANKS}, (rank,), ("R",), (4,), tuple(range(RANKS)))
        writer = Writer([RunFolder(tmp_path / "run", rank=rank, launch="one")], release=recorder.release)
        for _ in range(STEPS):
            recorder.observe(recorder.point(Place("a"), 1), buffer_of(np.ones(4, np.float32)))
            for step in recorder.close({"loss": 1.0}):
                writer.put(step)
        writer.close()
    return tmp_path / "run"


def test_the_copies_of_a_deleted_rank_stand_in_for_it(path: Path) -> None:
    """When the rank that counts for its copies has lost its records, the next one counts; what is lost is counted."""
    for segment in (path / "rank=0").glob("seg-*"):
        segment.unlink()
    run = tt.open_run(path)
    assert run.merged("ranks").num_rows == STEPS
    assert len(run.series("a:output", "mean").steps) == STEPS
    assert run.counts["missing_records"] == STEPS


def test_a_deleted_folder_costs_that_ranks_records_alone(path: Path) -> None:
    """The records of the other ranks are read, and so are the deleted rank's metrics, which lie elsewhere."""
    shutil.rmtree(path / "rank=0")
    run = tt.open_run(path)
    assert run.table().num_rows == (RANKS - 1) * STEPS and run.merged("ranks").num_rows == STEPS
    assert run.metrics().num_rows == RANKS * STEPS and run.ranks == list(range(RANKS))
