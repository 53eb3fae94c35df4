"""The folder of .npy files: every type comes back, no name leaves the folder, nothing is overwritten."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.errors import RunError
from tensortap.record.step import Record
from tensortap.reduce.buffers import NUMPY_DTYPES
from tensortap.reduce.reducers import full, sample
from tensortap.reduce.summary import summarize
from tensortap.sinks.npy import Npy, file_name, load_npy
from tensortap.types import Place

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def record(site, port="output", slot="", step=0, call=0, rank=0):
    return Record(step, "", rank, Place(site, port, slot), call, 0, "", False, 0, summarize(X))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_every_type_comes_back(dtype, tmp_path, make_step):
    """File and folder give the true type back, bit for bit; plain NumPy can open the file too."""
    array = np.arange(6).reshape(2, 3).astype(dtype)
    sink = Npy(tmp_path / "npy")
    sink.write(make_step({"fc": array}, number=12, keep=full()))
    sink.close()
    [(entry, back)] = load_npy(tmp_path / "npy").items()
    assert entry[:3] == ("step-00000012/fc-output-full.npy", 12, 0)
    assert (entry.site, entry.kind, entry.dtype, entry.shape) == ("fc", "full", dtype.name, (2, 3))
    alone = load_npy(tmp_path / "npy" / entry.file)
    for one in (back, alone):
        assert one.dtype == dtype
        assert one.tobytes() == array.tobytes()
    assert np.load(tmp_path / "npy" / entry.file).dtype.itemsize == dtype.itemsize


def test_scalars_and_empty_tensors_come_back(tmp_path):
    """No shape is special."""
    sink = Npy(tmp_path)
    arrays = [np.array(3, NUMPY_DTYPES[3]), np.zeros((0, 4), NUMPY_DTYPES[4]), np.zeros((2, 0))]
    for n, array in enumerate(arrays):
        sink.tensor(record(f"s{n}"), "full", array)
    sink.close()
    for array, back in zip(arrays, load_npy(tmp_path).values(), strict=True):
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_the_same_tensor_kept_twice_makes_two_files(tmp_path, make_step):
    """Two reducers of one kind, or a second run into the same folder, overwrite nothing."""
    sink = Npy(tmp_path)
    for _ in range(2):
        sink.write(make_step({"fc": X}, keep=[sample(2), sample(4)]))
    sink.close()
    found = load_npy(tmp_path)
    assert [back.shape for back in found.values()] == [(2,), (4,), (2,), (4,)]
    assert len({entry.file for entry in found}) == 4


def test_a_vanished_folder_is_an_error_until_it_is_back(tmp_path, make_step):
    """While the folder is gone each step raises; when it is back, writing goes on."""
    sink = Npy(tmp_path / "npy")
    shutil.rmtree(tmp_path / "npy")
    with pytest.raises(FileNotFoundError):
        sink.write(make_step({"fc": X}, keep=full()))
    (tmp_path / "npy").mkdir()
    sink.write(make_step({"fc": X}, number=1, keep=full()))
    sink.close()
    assert [entry.step for entry in load_npy(tmp_path / "npy")] == [1]


def test_a_torn_index_line_hides_only_itself(tmp_path):
    """After a crash the rest of the folder can still be read."""
    sink = Npy(tmp_path)
    sink.tensor(record("a"), "full", X)
    sink.close()
    with (tmp_path / "index.jsonl").open("a") as file:
        file.write('{"file": "step-0')
    assert [entry.site for entry in load_npy(tmp_path)] == ["a"]


def test_a_folder_that_is_none_of_ours_is_named(tmp_path):
    """The error says what is missing."""
    with pytest.raises(RunError, match=r"no index\.jsonl"):
        load_npy(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path):
    """A forged index is refused."""
    sink = Npy(tmp_path / "in")
    sink.tensor(record("a"), "full", X)
    sink.close()
    index = tmp_path / "in" / "index.jsonl"
    entry = json.loads(index.read_text())
    index.write_text(json.dumps(entry | {"file": "../out.npy"}) + "\n")
    np.save(tmp_path / "out.npy", X)
    with pytest.raises(RunError, match="outside its folder"):
        load_npy(tmp_path / "in")


HOSTILE = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "C:\\con",
    "con",
    "NUL.txt",
    "a/b",
    "<img src=x>",
    "x" * 5000,
]
names = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=300))
SAFE = re.compile(r"step-\d{8,}/[a-z0-9_][a-z0-9._~-]*")


@given(site=names, slot=names, kind=names, step=st.integers(0, 10**12), call=st.integers(0, 99), rank=st.integers(0, 9))
def test_every_name_is_safe(site, slot, kind, step, call, rank):
    """Whatever a site is called, its file lies inside the folder under a name every system takes."""
    name = file_name(record(site, slot=slot, step=step, call=call, rank=rank), kind)
    assert SAFE.fullmatch(name)
    assert len(name.partition("/")[2]) < 200
    assert name.partition("/")[2].partition(".")[0] not in {"con", "nul", "aux", "prn", "com1", "lpt1"}


keys = st.tuples(names, st.sampled_from(["output", "input"]), names, st.sampled_from(["full", "rows", "x-call1"]))


@given(st.lists(st.tuples(keys, st.integers(0, 2), st.integers(0, 2)), unique=True, max_size=12))
def test_different_keys_have_different_names(some):
    """Names are unique even where a file system does not tell capitals from small letters."""
    found = [file_name(record(*key[:3], call=call, rank=rank), key[3]).lower() for key, call, rank in some]
    assert len(set(found)) == len(found)


def test_hostile_names_stay_inside_the_folder():
    """Written for real, nothing lands beside the folder."""
    with tempfile.TemporaryDirectory() as outside:
        sink = Npy(Path(outside) / "in")
        for site in HOSTILE:
            sink.tensor(record(site), "full", X)
        sink.close()
        assert [p.name for p in Path(outside).iterdir()] == ["in"]
        assert [entry.site for entry in load_npy(Path(outside) / "in")] == HOSTILE
