"""JSON lines and CSV: what is written can be read back, and a file outlives trouble."""

import csv
import json
import math
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.errors import RunError
from tensortap.record.step import Record
from tensortap.reduce.statistics import COLUMNS
from tensortap.reduce.summary import summarize
from tensortap.sinks.csv import Csv
from tensortap.sinks.jsonl import JsonLines
from tensortap.sinks.linefile import LineFile
from tensortap.types import Place

X = np.arange(6, dtype=np.float32).reshape(2, 3)
FILE_SINKS = pytest.mark.parametrize("sink", [JsonLines, Csv])


def no_constant(name):
    raise ValueError(f"{name} is not JSON")


def read_jsonl(path):
    return [json.loads(line, parse_constant=no_constant) for line in path.read_text("utf-8").splitlines()]


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


floats = st.floats(width=32)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@st.composite
def records(draw):
    array = np.array(draw(st.lists(floats, max_size=12)), np.float32)
    return Record(
        step=draw(st.integers(0, 2**60)),
        phase=draw(st.sampled_from(["", "train", "eval"])),
        rank=draw(st.integers(0, 9)),
        place=Place(draw(names), draw(st.sampled_from(["output", "grad"])), draw(names), draw(names)),
        call=draw(st.integers(0, 5)),
        seq=draw(st.integers(0, 9)),
        reason=draw(names),
        recomputed=draw(st.booleans()),
        time=draw(st.integers(0, 2**60)),
        summary=summarize(array, histogram=draw(st.booleans())),
        numbers=draw(st.dictionaries(names, st.floats(), max_size=3)),
    )


def finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(record=records())
def test_jsonl_round_trip(record, tmp_path_factory):
    """Every column comes back as it was; what is not finite is null and the line is strict JSON."""
    path = tmp_path_factory.mktemp("jsonl") / "r.jsonl"
    sink = JsonLines(path)
    sink.record(record)
    sink.close()
    [row] = read_jsonl(path)
    assert list(row) == [*COLUMNS, "numbers"]
    for name in COLUMNS:
        expected = record[name]
        if name == "shape":
            expected = list(expected)
        if name == "hist_counts" and expected is not None:
            expected = expected.tolist()
        assert row[name] == finite(expected), name
    assert row["numbers"] == {name: finite(value) for name, value in record.numbers.items()}


@given(record=records())
def test_csv_round_trip(record, tmp_path_factory):
    """Every cell is the text of its value; lists are JSON; NaN is an empty cell."""
    path = tmp_path_factory.mktemp("csv") / "r.csv"
    sink = Csv(path)
    sink.record(record)
    sink.close()
    [row] = read_csv(path)
    assert list(row) == [*COLUMNS, "numbers"]
    for name in COLUMNS:
        value, text = record[name], row[name]
        if name in ("shape", "hist_counts") and value is not None:
            assert json.loads(text) == list(value)
        elif value is None or (isinstance(value, float) and math.isnan(value)):
            assert text == ""
        elif isinstance(value, float):
            assert float(text) == value
        elif isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
            assert text == f"'{value}"  # a spreadsheet takes it for text
        else:
            assert text == str(value)
    assert json.loads(row["numbers"], parse_constant=no_constant).keys() == record.numbers.keys()


@FILE_SINKS
def test_a_step_is_on_disk_when_write_returns(sink, tmp_path, make_step):
    """Nothing waits in a buffer between steps; parent folders are made."""
    path = tmp_path / "deep" / "er" / "file"
    one = sink(path)
    for number in range(3):
        one.write(make_step({"a": X}, number=number))
        rows = read_jsonl(path) if sink is JsonLines else read_csv(path)
        assert [int(r["step"]) for r in rows] == list(range(number + 1))
    one.close()


@FILE_SINKS
def test_an_existing_file_is_continued(sink, tmp_path, make_step):
    """A second process appends, with one header."""
    path = tmp_path / "file"
    for number in range(2):
        one = sink(path)
        one.write(make_step({"a": X}, number=number))
        one.close()
    rows = read_jsonl(path) if sink is JsonLines else read_csv(path)
    assert [int(r["step"]) for r in rows] == [0, 1]


@FILE_SINKS
def test_a_vanished_folder_is_an_error_until_it_is_back(sink, tmp_path, make_step):
    """While the folder is gone each step raises; when it is back, writing goes on with a header of its own."""
    folder = tmp_path / "gone"
    one = sink(folder / "file")
    one.write(make_step({"a": X}, number=0))
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        one.write(make_step({"a": X}, number=1))
    folder.mkdir()
    one.write(make_step({"a": X}, number=2))
    one.close()
    rows = read_jsonl(folder / "file") if sink is JsonLines else read_csv(folder / "file")
    assert [int(r["step"]) for r in rows] == [2]


def test_csv_leaves_other_files_alone(tmp_path):
    """A file with other columns is not appended to; the error names another one."""
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(RunError, match=r"other columns.*mine-2\.csv"):
        Csv(path)
    assert path.read_text() == "a,b\n1,2\n"


def test_a_full_disk_leaves_no_torn_line(tmp_path, monkeypatch):
    """What a failed write left behind is taken back; the next lines are whole."""
    file = LineFile(tmp_path / "a.txt")
    file.add("first")
    file.flush()

    class Full:
        """The same file on a disk that takes three bytes more."""

        def __init__(self, real):
            self.real, self.room = real, 3

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            taken, self.room = self.real.write(data[: self.room]), 0
            return taken

        def __getattr__(self, name):
            return getattr(self.real, name)

    file._file = Full(file._file)
    file.add("second")
    with pytest.raises(OSError, match="No space"):
        file.flush()
    file._file = file._file.real
    file.add("third")
    file.close()
    assert file.path.read_text() == "first\nthird\n"


def test_a_torn_last_line_is_closed_before_going_on(tmp_path):
    """After a crash in the middle of a line the next one stands on its own."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"st')
    file = LineFile(path)
    file.add('{"step": 2}')
    file.close()
    assert path.read_text().splitlines()[-1] == '{"step": 2}'


def test_names_that_are_no_unicode_can_be_written(tmp_path, make_step):
    """A lone surrogate in a name stops neither file."""
    for sink in (JsonLines, Csv):
        one = sink(tmp_path / sink.__name__)
        one.write(make_step({Place("a\udc80b"): X}))
        one.close()
        assert "udc80" in (tmp_path / sink.__name__).read_text()


def test_relative_paths_survive_a_change_of_folder(tmp_path, monkeypatch, make_step):
    """The file stays where it was opened."""
    monkeypatch.chdir(tmp_path)
    one = JsonLines("r.jsonl")
    (tmp_path / "other").mkdir()
    os.chdir(tmp_path / "other")
    one.write(make_step({"a": X}))
    one.close()
    assert len(read_jsonl(tmp_path / "r.jsonl")) == 1
