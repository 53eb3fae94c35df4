"""Compaction: few files, sorted by site, the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tensortap.errors import NotARunError, RunError
from tensortap.reduce.reducers import full
from tensortap.store import compact as compacting
from tensortap.store.claim import Lock
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.store.segments import write_segment

MakeRun = Callable[..., str]


@pytest.fixture
def scattered(make_run: MakeRun) -> Path:
    """A run of many segments: every segment of it also stands under other names, with other steps."""
    sites = [f"layer{i}" for i in range(9)]
    path = Path(
        make_run([({name: np.arange(5.0) + step for name in sites}, {"loss": 1.0}) for step in range(4)], keep=full())
    )
    [segment] = path.glob("rank=0/seg-*.parquet")
    table = pq.read_table(segment, partitioning=None)
    for copy in range(1, 6):
        steps = np.asarray(table["step"]) + 4 * copy
        moved = table.set_column(0, "step", [steps])
        write_segment(segment.with_name(f"seg-{copy:032x}.parquet"), moved)
    return path


def test_segments_fold_into_one_sorted_by_site(scattered: Path) -> None:
    """All rows are there, one site's rows lie together, and sites and steps are still known without reading them."""
    before = open_run(scattered)
    table, sites, steps = before.table(), before.sites, before.steps
    told: list[tuple[int, int]] = []
    tensors = len(list(scattered.glob("rank=0/tensors/*.safetensors")))
    result = compact(scattered, lambda done, total: told.append((done, total)))
    [segment] = scattered.glob("rank=0/seg-*.parquet")
    run = open_run(scattered)
    assert run.table().equals(table) and (run.sites, run.steps) == (sites, steps)
    assert result.rows == table.num_rows and result.after_files == result.before_files - 5 - (tensors - 1)
    column = pq.read_table(segment, columns=["site"], partitioning=None)["site"].to_pylist()
    assert column == sorted(column)
    assert told[-1] == (table.num_rows, table.num_rows)
    assert before.table().equals(table)  # a reader that was open before


def test_a_long_run_folds_in_portions_and_large_segments_stay(scattered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many neighbours in time fold together as fit into memory; what is large already is not touched again."""
    monkeypatch.setattr(compacting, "_ROWS_AT_ONCE", 80)  # two segments of 36 rows
    table = open_run(scattered).table()
    told: list[int] = []
    compact(scattered, lambda done, total: told.append(done))
    segments = {p: p.stat().st_mtime_ns for p in scattered.glob("rank=0/seg-*.parquet")}
    assert len(segments) == 3 and open_run(scattered).table().equals(table)
    assert sorted(len(pq.read_table(p, columns=["step"], partitioning=None)) for p in segments) == [72, 72, 72]
    assert told == [72, 144, 216, 216]
    compact(scattered)
    assert {p: p.stat().st_mtime_ns for p in scattered.glob("rank=0/seg-*.parquet")} == segments


def test_compacting_again_changes_nothing(scattered: Path) -> None:
    """A compacted run is left as it is."""
    compact(scattered)
    files = {p: p.stat().st_mtime_ns for p in scattered.rglob("*.parquet")}
    compact(scattered)
    assert {p: p.stat().st_mtime_ns for p in scattered.rglob("*.parquet")} == files


def test_a_replaced_segment_that_comes_back_is_not_counted_twice(scattered: Path) -> None:
    """A writer that was slow may put back a segment, or leave its tail, after two compactions: rows stay single."""
    [old] = scattered.glob("rank=0/seg-00000000000000000000000000000001.parquet")
    data, rows = old.read_bytes(), open_run(scattered).table().num_rows
    for _ in range(2):
        compact(scattered)
        old.write_bytes(data)
        assert open_run(scattered).table().num_rows == rows
        [other, *_] = [p for p in scattered.glob("rank=0/seg-*.parquet") if p != old]
        table = pq.read_table(other, partitioning=None)
        extra = other.with_name(f"seg-{rows:032x}.parquet")
        write_segment(extra, table.slice(0, 1))  # something new to fold
        rows += 1
    compact(scattered)
    assert open_run(scattered).table().num_rows == rows and not old.exists()


def test_a_live_run_is_compacted_around_its_writer(make_run: MakeRun, scattered: Path) -> None:
    """What is being written is left to its writer; sealed segments fold."""
    writing = RunFolder(scattered, resume=True)
    rows = open_run(scattered).table().num_rows
    compact(scattered)
    assert open_run(scattered).state == "live" and open_run(scattered).table().num_rows == rows
    writing.close()
    assert open_run(scattered).state == "finished"


def test_what_cannot_be_compacted(tmp_path: Path, scattered: Path) -> None:
    """A folder that is no run, and one that is being compacted, are clear errors."""
    with pytest.raises(NotARunError):
        compact(tmp_path)
    lock = Lock(scattered / "_compact")
    with pytest.raises(RunError, match="still running"):
        compact(scattered)
    lock.close()
