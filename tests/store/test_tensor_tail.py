"""The bytes of small tensors are written once: the file they are appended to becomes the safetensors file."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file

from tensortap.record.recorder import Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.kernel import crc32
from tensortap.reduce.reducers import full
from tensortap.select.probes import probe
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import Run, open_run
from tensortap.store.schema import TENSORS_WITH_DATA
from tensortap.store.tail import Tail, checks_path, data_path
from tensortap.store.tensor_index import DamagedTensorError
from tensortap.types import Place


def value(step: int, dtype: str = "float32", size: int = 6) -> np.ndarray:
    return (np.arange(size) + step).astype(dtype)


def written(path: Path, steps: int, *dtypes: str, size: int = 6, sites: int = 1) -> RunFolder:
    """A run that is not closed."""
    recorder, folder = Recorder([probe("**", keep=full())]), RunFolder(path)
    for number in range(steps):
        for site in range(sites):
            for dtype in dtypes or ("float32",):
                x = value(number + site, dtype, size)
                recorder.observe(recorder.point(Place(f"{dtype}.{site}"), 1), buffer_of(x), x)
        for step in recorder.close():
            folder.append(step)
            recorder.release(step)
    return folder


def data_files(path: Path) -> list[Path]:
    return sorted((path / "rank=0/tensors").glob("_tail-*.data"))


def sealed(path: Path) -> list[Path]:
    return sorted((path / "rank=0/tensors").glob("*.safetensors"))


def assert_whole(run: Run, steps: int, dtype: str = "float32", size: int = 6) -> None:
    assert [run.tensor(f"{dtype}.0", step).tolist() for step in range(steps)] == [
        value(step, dtype, size).tolist() for step in range(steps)
    ]
    assert run.damage == {}


def test_the_file_of_the_tail_is_the_sealed_file(tmp_path: Path) -> None:
    """Sealing writes a header where there was room for it and renames: no byte of a tensor moves."""
    folder = written(tmp_path, 3, "bfloat16", "float32", "float64", size=8)
    assert_whole(open_run(tmp_path), 3, size=8)
    [tail] = data_files(tmp_path)
    number, size = tail.stat().st_ino, tail.stat().st_size
    folder.close()
    [file] = sealed(tmp_path)
    assert (file.stat().st_ino, file.stat().st_size) == (number, size)
    assert load_file(file)["step=2/float64.0:output/call=0/full"].tolist() == value(2, size=8).tolist()
    assert_whole(open_run(tmp_path), 3, size=8)
    assert sorted(p.name for p in file.parent.iterdir()) == [file.name]


def test_a_header_that_is_full_begins_another_file(tmp_path: Path) -> None:
    """There are as many files as headers are filled, each with more room; and every tensor is there once."""
    written(tmp_path, 60, sites=4).close()
    assert len(sealed(tmp_path)) > 1
    run = open_run(tmp_path)
    assert len(list(run.tensors())) == 240
    assert run.tensor("float32.3", 59).tolist() == value(62).tolist()


def test_elements_that_are_not_aligned_are_copied(tmp_path: Path) -> None:
    """PyTorch reads none that begin between two multiples of their size: such a file is written again."""
    folder = written(tmp_path, 2, "float32", "int8", size=5)
    number = data_files(tmp_path)[0].stat().st_ino
    folder.close()
    [file] = sealed(tmp_path)
    assert file.stat().st_ino != number and not data_files(tmp_path)
    assert load_file(file)["step=1/int8.0:output/call=0/full"].tolist() == value(1, "int8", 5).tolist()


def test_a_flipped_bit_is_noticed_before_and_after_sealing(tmp_path: Path) -> None:
    """The checksum of each tensor is written with its row, in the step."""
    folder = written(tmp_path, 3)
    [data] = data_files(tmp_path)
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    for close in (lambda: None, folder.close):
        close()
        run = open_run(tmp_path)
        assert run.tensor("float32.0", 1).tolist() == value(1).tolist()
        with pytest.raises(DamagedTensorError, match="checksum"):
            run.tensor("float32.0", 2)
        assert run.damage


@pytest.mark.parametrize("cut", [0, 10])
def test_data_that_is_gone_is_counted_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    """Without the data, or with its end cut off: what can be read is sealed, and the tail is kept aside."""
    folder = written(tmp_path / "run", 3)
    path = Path(shutil.copytree(tmp_path / "run", tmp_path / "killed"))
    folder.close()
    [data] = data_files(path)
    data.write_bytes(data.read_bytes()[:-cut]) if cut else data.unlink()
    left = 2 if cut else 0
    for tidy in (lambda: None, lambda: compact(path)):
        tidy()
        run = open_run(path)
        assert len(list(run.tensors())) == left and run.damage
    assert list(path.rglob("*.arrows.damaged")) and not list(path.rglob("_tail-*.data"))


def test_tails_of_older_versions_are_read_and_sealed(tmp_path: Path) -> None:
    """They held the elements in their rows."""
    written(tmp_path, 1).close()
    x = value(1)
    columns = [
        [1], ["step=1/float32.0:output/call=0/full"],
        ['{"step": 1, "rank": 0, "site": "float32.0", "port": "output", "slot": "", "call": 0, "kind": "full"}'],
        ["float32"], [[6]], [x.tobytes()],
    ]  # fmt: skip
    tail = Tail(tmp_path / f"rank=0/tensors/_tail-{'a' * 32}.arrows", TENSORS_WITH_DATA, 0.0)
    arrays = [pa.array(c, field.type) for c, field in zip(columns, TENSORS_WITH_DATA, strict=True)]
    tail.append(pa.RecordBatch.from_arrays(arrays, schema=TENSORS_WITH_DATA))
    tail.close()
    assert_whole(open_run(tmp_path), 2)
    compact(tmp_path)
    assert_whole(open_run(tmp_path), 2)
    assert not tail.path.exists() and not checks_path(tail.path).exists() and not data_path(tail.path).exists()


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 127, 128, 1000, 4096, 70_001])
def test_the_checksum_is_that_of_zlib(size: int) -> None:
    """By whatever instructions it is computed, and wherever the bytes begin."""
    data = np.random.default_rng(size).bytes(size + 3)
    for begin in range(3):
        assert crc32(memoryview(data)[begin:]) == zlib.crc32(data[begin:])
