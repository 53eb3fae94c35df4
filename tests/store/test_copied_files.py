"""A file that lies under another's name is noticed: files say under which name they were written."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

from tensortap.errors import RunError
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.store.tail import checks_path, read_checks

sys.path.insert(0, str(Path(__file__).parent))
from mutations import record, rows_of

ROWS = 8  # of each launch: two sites, four steps


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two closed launches and one that was killed: two files of each kind, and tails."""
    return record(tmp_path_factory.mktemp("recorded") / "run", names=("a", "b"), launches=3, steps=4)


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def two(run: Path, pattern: str) -> tuple[Path, Path]:
    first, second = sorted(run.glob(pattern))
    return first, second


def table_rows(run: Path) -> Counter[str]:
    """The records, as text."""
    return Counter(json.dumps(row, default=str) for row in open_run(run).table().to_pylist())


def test_a_segment_copied_over_another_is_counted_and_doubles_nothing(run: Path) -> None:
    """The rows of the one that was overwritten are missing, those of the other are there once; compacted, too."""
    whole = table_rows(run)
    first, second = two(run, "rank=0/seg-*.parquet")
    shutil.copy(first, second)
    for _ in range(2):
        opened, rows = open_run(run), table_rows(run)
        assert rows.total() == 2 * ROWS and not rows - whole
        assert opened.counts["missing_records"] == ROWS
        compact(run)
    assert second.exists()  # it names one that is part of a larger file by now


def test_a_copy_is_named_with_its_original(run: Path) -> None:
    """`damage` tells which file it is a copy of; `counts` counts it."""
    first, second = two(run, "rank=0/seg-*.parquet")
    shutil.copy(first, second)
    opened = open_run(run)
    assert opened.damage == {f"rank=0/{second.name}": f"it is a copy of rank=0/{first.name}"}
    assert opened.counts["damaged_segments"] == 1


def test_a_copy_of_a_segment_that_was_compacted_stays_out(run: Path) -> None:
    """Under a new name, before and after the original has become part of a larger file."""
    whole = table_rows(run)
    first, _ = two(run, "rank=0/seg-*.parquet")
    copy = first.with_name(f"seg-{'c' * 32}.parquet")
    shutil.copy(first, copy)
    kept = copy.read_bytes()
    assert table_rows(run) == whole and open_run(run).counts["damaged_segments"] == 1
    compact(run)
    assert not first.exists() and table_rows(run) == whole
    copy.write_bytes(kept)
    assert table_rows(run) == whole


@pytest.mark.parametrize("compacted", [False, True])
def test_a_segment_that_was_only_renamed_is_read(run: Path, compacted: bool) -> None:
    """It is the original under any name; of two that say the same, one is read."""
    whole = table_rows(run)
    first, _ = two(run, "rank=0/seg-*.parquet")
    renamed = first.rename(first.with_name(f"seg-{'d' * 32}.parquet"))
    assert table_rows(run) == whole and open_run(run).counts == {}
    shutil.copy(renamed, first.with_name(f"seg-{'e' * 32}.parquet"))
    assert table_rows(run) == whole and open_run(run).counts == {"damaged_segments": 1}
    if compacted:
        compact(run)
        assert table_rows(run) == whole


def test_a_segment_of_another_rank_is_not_read_as_this_ones(run: Path) -> None:
    """A file's name in the run includes its folder."""
    first, _ = two(run, "rank=0/seg-*.parquet")
    (run / "rank=1").mkdir()
    shutil.copy(first, run / "rank=1" / first.name)
    opened = open_run(run)
    assert opened.table().num_rows == 3 * ROWS and list(opened.damage) == [f"rank=1/{first.name}"]


def test_tensors_copied_over_others_are_counted(run: Path) -> None:
    """The tensors that were overwritten are gone, and the file that they were in is named."""
    first, second = two(run, "rank=0/tensors/*.safetensors")
    whole = Counter(rows_of(open_run(run)))
    shutil.copy(first, second)
    opened = open_run(run)
    kept = Counter(rows_of(opened))
    assert (whole - kept).total() == ROWS and not kept - whole
    assert opened.damage == {f"rank=0/tensors/{second.name}": f"it is a copy of rank=0/tensors/{first.name}"}
    compact(run)
    assert Counter(rows_of(open_run(run))) == kept


def test_a_changed_digit_in_a_run_json_is_counted(run: Path) -> None:
    """Its checksum tells; rows are read, and a launch that resumes the run keeps the file aside, counted."""
    file = run / "run.json"
    wrong = file.read_text().replace('"python": "3', '"python": "4')
    rows = table_rows(run)
    assert wrong != file.read_text() and open_run(run).counts == {}
    file.write_text(wrong)
    opened = open_run(run)
    assert opened.counts == {"damaged_files": 1} and "checksum" in opened.damage["run.json"]
    assert opened.info["python"].startswith("4") and "crc32" not in opened.info and table_rows(run) == rows
    RunFolder(run, resume=True).close()
    assert open_run(run).counts == {"damaged_files": 1} and (run / "run.json.damaged").read_text() == wrong
    RunFolder(run, overwrite=True).close()
    assert open_run(run).counts == {} and not (run / "run.json.damaged").exists()


def test_a_run_json_without_a_checksum_is_read(run: Path) -> None:
    """As older versions wrote it."""
    said = json.loads((run / "run.json").read_text())
    assert isinstance(said.pop("crc32"), int) and said.pop("checked") is True
    (run / "run.json").write_text(json.dumps(said))
    assert open_run(run).counts == {} and open_run(run).info["launch"] == said["launch"]
    (run / "run.json").write_text(json.dumps({**said, "crc32": 1, "schema": "none"}))
    with pytest.raises(RunError):
        open_run(run)


@pytest.mark.parametrize("folder", ["rank=0", "metrics/rank=0", "rank=0/tensors"])
def test_checksums_of_another_tail_are_not_believed(run: Path, folder: str) -> None:
    """A `.crc` file that was copied over another costs no row: its checksums say whose they are."""
    whole = Counter(rows_of(open_run(run)))
    [mine] = run.glob(f"{folder}/_tail-*.crc")
    for other in run.rglob("_tail-*.crc"):
        shutil.copyfile(other, mine) if other != mine else None
        assert Counter(rows_of(open_run(run))) == whole


@pytest.mark.parametrize("name", ["crc32", "checked"])
def test_a_checksum_whose_name_is_damaged_is_missed(run: Path, name: str) -> None:
    """A flipped bit in the name of the checksum does not make the file one of an older version, which had none."""
    text = (run / "run.json").read_text()
    assert text.count(f'"{name}"') == 1 and open_run(run).counts == {}
    (run / "run.json").write_text(text.replace(f'"{name}"', f'"{name[:-1]}!"'))
    assert open_run(run).counts == {"damaged_files": 1}


def test_older_checksums_are_believed(run: Path) -> None:
    """Those that do not say whose they are: a flipped bit in the tail is noticed."""
    [tail] = run.glob("rank=0/_tail-*.arrows")
    older = b"".join(struct.pack("<QII", s, e - s, c) for s, e, c in read_checks(tail))
    entries = [older[at : at + 16] for at in range(0, len(older), 16)]
    checks_path(tail).write_bytes(b"".join(entry + struct.pack("<I", zlib.crc32(entry)) for entry in entries))
    assert len(read_checks(tail)) == len(entries) > 4 and open_run(run).counts == {}
    data = bytearray(tail.read_bytes())
    data[len(data) // 2] ^= 1
    tail.write_bytes(data)
    assert open_run(run).counts["damaged_tails"] == 1


def test_tensors_of_version_1_are_held_against_the_name_of_their_file(tmp_path: Path) -> None:
    """Its files do not say how they were called; a name says which steps and whose, and what is there is read."""
    run = Path(shutil.copytree(Path(__file__).parent / "fixtures" / "v1", tmp_path / "v1"))
    assert len(list(open_run(run).tensors())) > 0 and open_run(run).counts == {}
    first, second = sorted(run.glob("rank=0/tensors/*.safetensors"))[:2]
    shutil.copyfile(first, second)
    opened = open_run(run)
    kept = [(key.rank, key.name()) for key, _ in opened.tensors()]
    assert len(kept) == len(set(kept)) > 0 and opened.counts == {"damaged_tensors": 1}
    assert "other steps" in opened.damage[str(second.relative_to(run))]


def test_compacting_leaves_tensors_of_another_file_where_they_are(tmp_path: Path) -> None:
    """Tensors of two ranks have the same names: joined, the copied ones took the places of those that were there."""
    run = Path(shutil.copytree(Path(__file__).parent / "fixtures" / "v1", tmp_path / "v1"))
    mine = sorted(run.glob("rank=0/tensors/*.safetensors"))
    shutil.copyfile(min(run.glob("rank=1/tensors/*.safetensors")), mine[1])
    before = Counter(rows_of(open_run(run)))
    compact(run)
    opened = open_run(run)
    assert Counter(rows_of(opened)) == before
    assert mine[1].exists() and opened.counts == {"damaged_tensors": 1}
