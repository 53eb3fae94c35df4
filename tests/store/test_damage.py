"""A torn, flipped or hostile run folder costs what was damaged and nothing else."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tensortap.cli.app import cli
from tensortap.errors import RunError
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.store.segments import REPLACES, STEPS, write_segment
from tensortap.store.tail_reader import decode

sys.path.insert(0, str(Path(__file__).parent))
from mutations import last_message, record

FIXTURES = Path(__file__).parent / "fixtures"
ROWS = 24  # of each of two files: a segment and a tail


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a closed launch and of one that was killed: a segment, tails, tensors of both kinds."""
    return record(tmp_path_factory.mktemp("recorded") / "run", names=("a", "b"), launches=2, steps=12)


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run of version 1, without checksums."""
    return Path(shutil.copytree(FIXTURES / "v1", tmp_path / "v1"))


def only(path: Path, pattern: str) -> Path:
    [found] = path.glob(pattern)
    return found


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_the_fixture_is_whole(run: Path) -> None:
    """Nothing is counted in a run that nothing happened to."""
    opened = open_run(run)
    assert opened.table().num_rows == 2 * ROWS and opened.counts == {} and opened.damage == {}
    assert opened.state == "crashed" and len(list(opened.tensors())) == 2 * ROWS


@pytest.mark.parametrize("resume", [False, True])
def test_a_tail_without_its_beginning_is_salvaged_and_kept(run: Path, resume: bool) -> None:
    """With its first bytes zeroed every row is still read, and neither compaction nor resuming deletes the tail."""
    tail = only(run, "rank=0/_tail-*.arrows")
    overwrite(tail, 0, bytes(8))
    before = tail.read_bytes()
    assert open_run(run).counts["damaged_tails"] == 1
    rows = open_run(run).table().num_rows
    if resume:
        RunFolder(run, resume=True).close()
    compact(run)
    kept = only(run, "rank=0/_tail-*.arrows.damaged")
    assert kept.read_bytes() == before and open_run(run).table().num_rows == rows >= 2 * ROWS - 2
    assert open_run(run).counts["damaged_tails"] == 1 and kept.name in str(open_run(run).damage)
    compact(run)
    assert kept.exists() and open_run(run).table().num_rows == rows


def test_an_old_tail_without_its_beginning_is_salvaged_whole(old_run: Path) -> None:
    """Of a run without checksums too: the schema is known."""
    rows = open_run(old_run).table().num_rows
    overwrite(only(old_run, "rank=1/_tail-*.arrows"), 0, bytes(8))
    assert open_run(old_run).table().num_rows == rows
    compact(old_run)
    assert open_run(old_run).table().num_rows == rows and open_run(old_run).counts["damaged_tails"] == 1


@pytest.mark.parametrize("name", [b"step", b"site", b"numel"])
def test_an_old_tail_with_a_column_that_is_no_text_is_salvaged_whole(old_run: Path, name: bytes) -> None:
    """The schema is known, so that a flipped bit in the name of a column costs nothing."""
    rows = open_run(old_run).table().num_rows
    tail = only(old_run, "rank=1/_tail-*.arrows")
    overwrite(tail, tail.read_bytes().index(name) + len(name) - 1, b"\xf0")
    run = open_run(old_run)
    assert run.table().num_rows == rows and run.counts["damaged_tails"] == 1


def test_old_tensors_whose_names_were_zeroed_are_counted(old_run: Path) -> None:
    """Names that became equal do not hide all but one of their tensors."""
    whole = len(list(open_run(old_run).tensors()))
    tail = only(old_run, "rank=1/tensors/_tail-*.arrows")
    overwrite(tail, 952, bytes(64))  # where the names of a batch's rows end
    run = open_run(old_run)
    assert len(list(run.tensors())) < whole and run.counts["damaged_tails"] == 1


def old_tails() -> list[Path]:
    return sorted((FIXTURES / "v1").rglob("_tail-*.arrows"))


@pytest.mark.parametrize("tail", old_tails(), ids=lambda tail: "/".join(tail.parts[-3:-1]))
def test_a_damaged_length_does_not_make_an_old_message_look_torn(tail: Path) -> None:
    """Whatever bit of the last message's lengths is flipped: a row that is lost by that is counted."""
    whole, rows = tail.read_bytes(), len(decode(tail.read_bytes()).table)
    last = last_message(whole)
    lengths = [*range(last + 4, last + 8), *range(last + 8, last + 8 + 80)]  # the body's is among the first
    for at, bit in itertools.product(lengths, range(8)):
        content = decode(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        assert content.damaged or len(content.table) == rows, (at - last, bit)


@pytest.mark.parametrize("tail", old_tails(), ids=lambda tail: "/".join(tail.parts[-3:-1]))
def test_an_old_message_that_was_being_written_is_not_damage(tail: Path) -> None:
    """Wherever the process was killed in it."""
    whole = tail.read_bytes()
    for end in range(last_message(whole) + 1, len(whole), 7):
        assert not decode(whole[:end]).damaged, end


def test_a_last_batch_whose_checksum_does_not_hold_is_counted(run: Path) -> None:
    """Not taken for one that a killed process did not finish, whatever its header announces now."""
    tail = only(run, "metrics/rank=0/_tail-*.arrows")
    whole, rows = tail.read_bytes(), open_run(run).metrics().num_rows
    for at in range(last_message(whole), len(whole), 9):
        tail.write_bytes(whole[:at] + bytes([whole[at] ^ 32]) + whole[at + 1 :])
        found = open_run(run)
        assert found.metrics().num_rows <= rows and found.counts["damaged_tails"] == 1, at


def test_behind_a_bad_batch_reading_goes_on(run: Path) -> None:
    """Damage in the middle of a tail costs the batches it lies in; the others are read and sealed."""
    tail = only(run, "rank=0/_tail-*.arrows")
    overwrite(tail, tail.stat().st_size // 2, bytes(64))
    opened = open_run(run)
    rows, counts = opened.table().num_rows, opened.counts
    assert 2 * ROWS - 6 <= rows < 2 * ROWS
    assert counts == {"damaged_tails": 1, "missing_records": 2 * ROWS - rows} or counts == {"damaged_tails": 1}
    assert opened.steps[-1] == 23
    compact(run)
    assert open_run(run).table().num_rows == rows and list(run.rglob("*.arrows.damaged"))


@pytest.mark.parametrize("pattern", ["rank=0/_tail-*.arrows", "rank=0/seg-*.parquet"])
def test_a_flipped_bit_in_a_value_is_noticed(run: Path, pattern: str) -> None:
    """Checksums tell: what is read is what was written, and the rest is counted."""
    known = {json.dumps(row, default=str) for row in open_run(run).table().to_pylist()}
    file = only(run, pattern)
    size = file.stat().st_size
    for at in range(size // 4, size // 4 + 40, 5):
        original = file.read_bytes()
        overwrite(file, at, bytes([original[at] ^ 4]))
        opened = open_run(run)
        rows = [json.dumps(row, default=str) for row in opened.table().to_pylist()]
        assert set(rows) <= known
        assert len(rows) == len(known) or opened.damage
        file.write_bytes(original)


@pytest.mark.parametrize("folder", ["rank=0", "metrics/rank=0"])
def test_a_flipped_bit_in_a_footer_is_noticed(run: Path, folder: str) -> None:
    """Whatever bit of a footer is wrong, or of its checksum, the segment is left out and counted, and no other is."""
    segment = only(run, f"{folder}/seg-*.parquet")
    whole = segment.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    begin = len(whole) - 8 - length - 4  # the checksum lies in front of the footer
    for at in range(begin, len(whole), length // 40):
        overwrite(segment, at, bytes([whole[at] ^ 1 << at % 8]))
        opened = open_run(run)
        assert opened.counts["damaged_segments"] == 1 and list(opened.damage) == [f"{folder}/{segment.name}"], at
        overwrite(segment, at, whole[at : at + 1])
    assert open_run(run).counts == {}


def test_a_flipped_bit_in_a_tensor_is_noticed(run: Path) -> None:
    """The tensor is refused by name; the others of its file are read."""
    file = only(run, "rank=0/tensors/*.safetensors")
    overwrite(file, file.stat().st_size - 1, b"\x01")
    opened = open_run(run)
    assert len(list(opened.tensors())) == 2 * ROWS - 1
    assert opened.counts == {"damaged_tensors": 1} and "checksum" in opened.damage[str(file.relative_to(run))]
    compact(run)
    assert file.exists()


def test_a_deleted_segment_is_missed(run: Path) -> None:
    """`_rank.json` knows how many records there were, in all launches together."""
    RunFolder(run, resume=True).close()
    state = json.loads((run / "rank=0/_rank.json").read_text())
    (run / "rank=0/_rank.json").write_text(json.dumps({**state, "total_records": 2 * ROWS}))
    RunFolder(run, resume=True).close()
    assert open_run(run).counts == {}
    next(run.glob("rank=0/seg-*.parquet")).unlink()
    opened = open_run(run)
    assert opened.table().num_rows == ROWS and opened.counts == {"missing_records": ROWS}


def test_a_truncated_tail_is_counted(run: Path) -> None:
    """A tail that is shorter than its checksums say has lost something; a batch without one was torn by a kill."""
    tail = only(run, "rank=0/_tail-*.arrows")
    os.truncate(tail, tail.stat().st_size // 2)
    assert open_run(run).counts["damaged_tails"] == 1


def replace_metadata(segment: Path, **said: Any) -> None:
    table = pq.read_table(segment, partitioning=None)
    metadata = dict(pq.read_metadata(segment).metadata)
    names = {"steps": STEPS, "replaces": REPLACES}
    metadata |= {names[name]: json.dumps(value).encode() for name, value in said.items()}
    with pq.ParquetWriter(segment, table.schema) as writer:
        writer.add_key_value_metadata({k: v for k, v in metadata.items() if k.startswith(b"tensortap")})
        writer.write_table(table)


@pytest.mark.parametrize(
    "said",
    [
        {"steps": [[0, 10**18, 1]]}, {"steps": [[0, 5, 0]]}, {"steps": [["a"]]}, {"steps": {"a": 1}},
        {"replaces": "itself"}, {"replaces": ["other"]}, {"replaces": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_footer_that_lies_costs_nothing(run: Path, said: dict[str, Any]) -> None:
    """Absurd ranges, a stride of 0, a segment that replaces itself: the rows are read all the same."""
    segment, tail = only(run, "rank=0/seg-*.parquet"), only(run, "rank=0/_tail-*.arrows")
    if said == {"replaces": "itself"}:
        said = {"replaces": [segment.name.removeprefix("seg-").removesuffix(".parquet")]}
    replace_metadata(segment, **said)
    for _ in range(2):
        opened = open_run(run)
        assert opened.table().num_rows == 2 * ROWS and opened.steps == list(range(24))
        tail.unlink(missing_ok=True) if not tail.exists() else None
        compact(run)


STATES: dict[str, Any] = {
    "list": [1], "deep": None, "counts": {"counts": [1]}, "parts": {"parts": {"a:output": {"mesh": 3}}},
    "cost": {"cost": {"share": "a"}}, "unseen": {"unseen": ["a"]}, "lines": {"lines": 3},
    "last_step": {"last_step": 1e300}, "nonsense": {"state": 3, "records": "many"},
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_rank_json_of_another_form_is_counted(run: Path, name: str) -> None:
    """Rows are read, what has the right form is used, and the file is counted."""
    text = "[" * 100_000 if name == "deep" else json.dumps(STATES[name])
    (run / "rank=0/_rank.json").write_text(text)
    opened = open_run(run)
    assert opened.table().num_rows == 2 * ROWS and opened.counts["damaged_files"] == 1
    assert opened.last_step == 23 and opened.info["schema"] == 1 and opened.merged("ranks").num_rows == 2 * ROWS
    opened.findings()


def test_a_flipped_digit_in_a_rank_json_is_counted(run: Path) -> None:
    """Of the right form and yet wrong: its checksum tells, and what it says is used all the same."""
    state = run / "rank=0/_rank.json"
    text = state.read_text()
    assert '"total_records": 48' in text and open_run(run).counts == {}
    state.write_text(text.replace('"total_records": 48', '"total_records": 49'))
    assert open_run(run).counts == {"damaged_files": 1, "missing_records": 1}
    assert "checksum" in open_run(run).damage["rank=0/_rank.json"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lie_about_header(path: Path) -> None:
    overwrite(path, 0, (1 << 40).to_bytes(8, "little"))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_out(path: Path) -> None:
    outside = path.parents[2] / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("harm", [cut, lie_about_header, empty, pipe, link_out, device])
@pytest.mark.parametrize("pattern", ["rank=0/tensors/*.safetensors", "rank=0/seg-*", "rank=0/_tail-*.arrows"])
def test_one_bad_file_costs_that_file(run: Path, pattern: str, harm: Callable[[Path], None]) -> None:
    """Cut, empty, lying or special files are counted at once, and everything beside them is read."""
    file = only(run, pattern)
    harm(file)
    opened = open_run(run)
    rows, tensors = opened.table().num_rows, len(list(opened.tensors()))
    assert rows >= ROWS and tensors >= ROWS
    if harm is not empty:
        assert (rows, tensors) == (2 * ROWS, 2 * ROWS) or opened.counts
    compact(run)
    assert (open_run(run).table().num_rows >= rows and os.path.lexists(file)) or list(run.rglob("seg-*"))


@pytest.mark.parametrize("harm", [pipe, link_out, device, empty, cut])
def test_a_run_json_that_cannot_be_read_is_refused_by_name(run: Path, harm: Callable[[Path], None]) -> None:
    """A pipe or a link out of the folder is refused at once."""
    harm(run / "run.json")
    with pytest.raises(RunError, match=r"run\.json"):
        open_run(run)


@pytest.mark.parametrize("value", [None, False, 1, "x", []])
def test_a_mark_of_the_checksum_that_was_changed_is_counted(run: Path, value: Any) -> None:
    """`checked` says that there is a checksum, and is not under it."""
    file = run / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "checked": value}))
    assert "run.json" in str(open_run(run).damage)


@pytest.mark.parametrize("resumed", [-1, "x", None, [[1]], {"start": "x", "ranks": [0]}, {"start": 3, "ranks": 5}])
def test_a_run_json_with_another_resumption_is_resumed(run: Path, resumed: Any) -> None:
    """What it says of the last resumption cannot be: the rows stay, and the run goes on after them."""
    steps = open_run(run).steps
    file = run / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "resumed": resumed}))
    RunFolder(run, resume=True).close()
    assert open_run(run).steps == steps


def test_a_lock_that_is_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
    """Neither resuming nor compacting empties what `_lock` points to."""
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    (run / "rank=0/_lock").unlink()
    (run / "rank=0/_lock").symlink_to(precious)
    with pytest.raises(RunError, match="_lock is not a regular file"):
        RunFolder(run, resume=True)
    compact(run)
    assert precious.read_text() == "thesis" and open_run(run).table().num_rows == 2 * ROWS


def test_rows_without_a_place_are_left_out(run: Path) -> None:
    """Null sites in a segment are counted, and no reader meets them."""
    segment = only(run, "rank=0/seg-*.parquet")
    table = pq.read_table(segment, partitioning=None)
    sites = pa.array([None, *table["site"].to_pylist()[1:]], table["site"].type)
    pq.write_table(table.set_column(table.column_names.index("site"), "site", sites), segment)
    opened = open_run(run)
    assert opened.table().num_rows == 2 * ROWS - 1 and opened.counts["damaged_segments"] == 1
    assert list(opened.records())


def test_doctor_reads_a_run_to_its_end(run: Path) -> None:
    """`tensortap doctor RUN` names what is damaged, also what nobody has read yet, and counts it as `show` does."""
    whole = CliRunner().invoke(cli, ["doctor", str(run)])
    assert whole.exit_code == 0 and "every file can be read" in whole.output
    segment, tensors = only(run, "rank=0/seg-*.parquet"), only(run, "rank=0/tensors/step-*.safetensors")
    overwrite(segment, 100, b"\xff" * 8)
    overwrite(tensors, tensors.stat().st_size - 4, b"\xff" * 4)
    found = CliRunner().invoke(cli, ["doctor", str(run), "--json"])
    said = json.loads(found.output)
    assert found.exit_code == 1 and set(said["damage"]) == {str(p.relative_to(run)) for p in (segment, tensors)}
    assert said["counts"]["damaged_segments"] == said["counts"]["damaged_tensors"] == 1
    shown = CliRunner().invoke(cli, ["doctor", str(run)])
    assert shown.exit_code == 1 and "damaged segments 1" in shown.output and segment.name in shown.output


@pytest.mark.parametrize("offset", [1 << 30, -5])
def test_histograms_beyond_all_buckets_are_left_out(run: Path, offset: int) -> None:
    """A row that would take gigabytes to draw is not given to any reader, and is counted."""
    segment = only(run, "rank=0/seg-*.parquet")
    table = pq.read_table(segment, partitioning=None)
    numbers = [offset, *table["hist_offset"].to_pylist()[1:]]
    changed = pa.array(numbers, table.schema.field("hist_offset").type)
    write_segment(segment, table.set_column(table.column_names.index("hist_offset"), "hist_offset", changed))
    opened = open_run(run)
    assert opened.table().num_rows == 2 * ROWS - 1 and opened.counts["damaged_segments"] == 1
    assert len(opened.merged("steps")) and opened.findings() is not None
