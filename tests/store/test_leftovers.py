"""What a kill between two files leaves behind is cleared away by compaction and by resuming, and nothing else is."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tensortap.store.claim import Lock, compacting
from tensortap.store.compact import compact
from tensortap.store.files import Files
from tensortap.store.folder import RunFolder
from tensortap.store.names import hidden_name
from tensortap.store.run import open_run
from tensortap.store.segments import seal_records, seal_tensors

sys.path.insert(0, str(Path(__file__).parent))
from mutations import record

FOLDERS = ("rank=0", "metrics/rank=0", "rank=0/tensors")
Tidy = Callable[[Path], None]


def resume(path: Path) -> None:
    RunFolder(path, resume=True).close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "run", names=("a", "b"), launches=1, steps=6)


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


@pytest.fixture(params=[compact, resume])
def tidy(request: pytest.FixtureRequest) -> Tidy:
    chosen: Tidy = request.param
    return chosen


def leftovers(path: Path) -> list[str]:
    return [str(p.relative_to(path)) for p in path.rglob("*") if p.name.startswith(("_tail", "_compact", "."))]


def seal_without_removing(path: Path, folder: str) -> Path:
    """Seal the tail of a folder, and put it back: as after a kill before it was removed."""
    [tail] = (path / folder).glob("_tail-*.arrows")
    kept = {p: p.read_bytes() for p in (tail, tail.with_suffix(".crc"))}
    (seal_tensors if folder.endswith("tensors") else seal_records)(Files(path), folder, tail)
    for file, data in kept.items():
        file.write_bytes(data)
    return tail


@pytest.mark.parametrize("folder", FOLDERS)
def test_checksums_whose_tail_is_gone_are_removed(run: Path, folder: str, tidy: Tidy) -> None:
    """A kill after the tail was removed, before its checksums were: the rows are sealed, and no file stays."""
    rows, tensors = open_run(run).table(), len(list(open_run(run).tensors()))
    seal_without_removing(run, folder).unlink()
    assert list((run / folder).glob("_tail-*.crc"))
    tidy(run)
    assert leftovers(run) == []
    assert open_run(run).table().equals(rows) and len(list(open_run(run).tensors())) == tensors
    assert open_run(run).counts == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_tail_that_was_sealed_already_is_removed(run: Path, folder: str, tidy: Tidy) -> None:
    """A kill after sealing, before the tail was removed: its rows are there once, and the tail goes."""
    rows, tensors = open_run(run).table(), len(list(open_run(run).tensors()))
    seal_without_removing(run, folder)
    assert open_run(run).table().equals(rows) and len(list(open_run(run).tensors())) == tensors
    tidy(run)
    assert leftovers(run) == []
    assert open_run(run).table().equals(rows) and len(list(open_run(run).tensors())) == tensors


def test_checksums_follow_a_damaged_tail_that_was_kept_aside(run: Path, tidy: Tidy) -> None:
    """A kill between the two renames: the checksums are kept with the tail, for whoever reads more of it one day."""
    [tail] = run.glob("rank=0/_tail-*.arrows")
    tail.rename(f"{tail}.damaged")
    tidy(run)
    assert sorted(p.name for p in run.glob("rank=0/_tail-*")) == [f"{tail.name}.damaged", f"{tail.stem}.crc.damaged"]


def test_a_damaged_tail_that_was_sealed_is_kept_aside_and_counted(run: Path, tidy: Tidy) -> None:
    """A kill after the rows that can be read were sealed: the tail does not stay among the sealed ones unnoticed."""
    [tail] = run.glob("rank=0/_tail-*.arrows")
    with tail.open("r+b") as file:
        file.seek(tail.stat().st_size // 2)
        file.write(bytes(64))
    seal_without_removing(run, "rank=0")
    for aside in run.glob("rank=0/*.damaged"):
        aside.unlink()
    rows = open_run(run).table()
    tidy(run)
    assert list(run.glob("rank=0/_tail-*.arrows.damaged")) and not list(run.glob("rank=0/_tail-*.arrows"))
    assert open_run(run).table().equals(rows) and open_run(run).counts["damaged_tails"] == 1


def test_files_that_were_never_finished_are_removed(run: Path, tidy: Tidy) -> None:
    """Hidden files of a killed process go; files of others that only look hidden stay."""
    for name in (
        "rank=0/_rank.json",
        "rank=0/seg-ab.parquet",
        "rank=0/tensors/step-000000000-000000001-cd.safetensors",
    ):
        folder, _, last = name.rpartition("/")
        (run / folder / hidden_name(last)).write_bytes(b"half")
    (run / "rank=0/tensors/.tmpenbrg7").write_bytes(b"half")  # of safetensors
    (run / "rank=0/.notes").write_text("mine")
    tidy(run)
    assert leftovers(run) == ["rank=0/.notes"]


def test_a_run_json_that_was_never_finished_is_removed(run: Path) -> None:
    """By compaction, when nobody is writing the run."""
    hidden = run / hidden_name("run.json")
    hidden.write_bytes(b"half")
    lock = Lock(run / "rank=0/_lock")
    try:
        compact(run)
    finally:
        lock.close()
    assert hidden.exists()
    compact(run)
    assert leftovers(run) == []


def test_what_a_live_process_writes_is_not_touched(run: Path) -> None:
    """While another process holds the rank, compaction removes none of its files; while one compacts, resuming none."""
    [tail] = run.glob("rank=0/_tail-*.arrows")
    hidden = run / "rank=0" / hidden_name("seg-ab.parquet")
    hidden.write_bytes(b"half")
    checks = run / "rank=0/_tail-ab.crc"
    checks.write_bytes(b"")
    lock = Lock(run / "rank=0/_lock")
    try:
        compact(run)
        assert hidden.exists() and checks.exists() and tail.exists()
    finally:
        lock.close()
    with compacting(Files(run)):
        resume(run)
    assert hidden.exists() and not checks.exists() and not tail.exists()


def test_a_lock_that_was_removed_between_opening_and_locking_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a lock file that its owner removes does not lock a file that nobody sees."""
    path, opened = tmp_path / "_compact", os.open

    def remove_once(*args: object, **options: object) -> int:
        monkeypatch.undo()
        fd = opened(*args, **options)  # type: ignore[arg-type]
        path.unlink()
        return fd

    monkeypatch.setattr(os, "open", remove_once)
    lock = Lock(path)
    assert path.exists()
    lock.close()
