"""Raw tensors: every type comes back bit for bit, from tails, files and compacted files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from tensortap.errors import RunError
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import NUMPY_DTYPES, buffer_of
from tensortap.reduce.reducers import full, rows, sample
from tensortap.select.probes import probe
from tensortap.select.triggers import metric
from tensortap.store import folder as storing
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import Run, open_run
from tensortap.types import Place

SHAPES = [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """One array of every type and shape, of random bits where every bit pattern is a value."""
    rng = np.random.default_rng(0)
    made = {}
    for dtype in NUMPY_DTYPES:
        for shape in SHAPES:
            size = int(np.prod(shape)) * dtype.itemsize
            raw = rng.integers(0, 2 if dtype.kind == "b" else 256, size, np.uint8)
            made[f"{dtype.name}.{len(shape)}d{0 in shape}"] = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
    return made


def write(path: Path, steps: list[dict[str, np.ndarray[Any, Any]]], close: bool = True) -> Writer:
    recorder = Recorder([probe("**", keep=full())])
    writer = Writer([RunFolder(path)], release=recorder.release)
    for tensors in steps:
        for name, array in tensors.items():
            recorder.observe(recorder.point(Place(name), 1), buffer_of(array))
        for step in recorder.close():
            writer.put(step)
    if close:
        writer.close()
    return writer


def assert_there(run: Run, step: int, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    for name, array in tensors.items():
        got = run.tensor(name, step)
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name
        assert got.flags.writeable


@pytest.mark.parametrize("inline", [True, False], ids=["small", "large"])
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16, fp8, complex128, bool, empty and scalar tensors are the same live, sealed and compacted."""
    monkeypatch.setattr(storing, "INLINE_BYTES", 1 << 20 if inline else 0)
    tensors = arrays()
    writer = write(tmp_path / "run", [tensors, tensors], close=False)
    writer.flush()
    assert_there(open_run(tmp_path / "run"), 1, tensors)
    writer.close()
    assert_there(open_run(tmp_path / "run"), 0, tensors)
    compact(tmp_path / "run")
    assert_there(open_run(tmp_path / "run"), 0, tensors)
    assert_there(open_run(tmp_path / "run"), 1, tensors)
    assert len(list((tmp_path / "run/rank=0/tensors").iterdir())) == 1


def test_others_read_the_files(tmp_path: Path) -> None:
    """The safetensors package reads every tensor; types that the format lacks are there as bytes."""
    tensors = arrays()
    write(tmp_path / "run", [tensors])
    [file] = (tmp_path / "run/rank=0/tensors").iterdir()
    loaded = safetensors.torch.load_file(file)
    odd = {"complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"}
    for name, array in tensors.items():
        got = loaded[f"step=0/{name}:output/call=0/full"]
        assert got.contiguous().flatten().view(torch.uint8).numpy().tobytes() == array.tobytes()
        dtype = name.split(".")[0]
        if dtype not in odd:
            assert str(got.dtype) == f"torch.{dtype}" and tuple(got.shape) == array.shape
    with safe_open(file, framework="np") as opened:
        assert opened.get_tensor("step=0/float32.3dFalse:output/call=0/full").shape == (2, 3, 4)


def test_a_large_tensor_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Above a megabyte a step's tensors go to one file, named by the step."""
    big = np.random.default_rng(0).normal(size=(1 << 18)).astype(np.float32)
    write(tmp_path / "run", [{"a": big, "b": big[:10]}, {"a": big[:10]}])
    names = sorted(p.name[:24] for p in (tmp_path / "run/rank=0/tensors").iterdir())
    assert names == ["step-000000000-000000000", "step-000000001-000000001"]
    assert_there(open_run(tmp_path / "run"), 0, {"a": big, "b": big[:10]})


def kept(tmp_path: Path, lookback: int = 0) -> Run:
    probes = [
        probe("a", keep=[full(), rows([0])]),
        probe("a", keep=[sample(2), full()], when=metric("loss") > 1),
        probe("a", keep=sample(3, seed=1), when=metric("loss") > 2),
    ]
    recorder = Recorder(probes, lookback=lookback)
    writer = Writer([RunFolder(tmp_path / "run")], release=recorder.release)
    for loss in (0, 0, 2, 3):
        for call in range(2):
            value = np.arange(12.0).reshape(4, 3) + 100 * recorder.current.number + call
            recorder.observe(recorder.point(Place("a"), 7), buffer_of(value))
        for step in recorder.close({"loss": loss}):
            writer.put(step)
    writer.close()
    return open_run(tmp_path / "run")


def test_look_back_brings_each_probes_tensors_once(tmp_path: Path) -> None:
    """Tensors of the same kind that different probes kept, some of them later, are all there and told apart."""
    run = kept(tmp_path, lookback=5)
    found = sorted((k.step, k.call, k.probe, k.kind) for k, _ in run.tensors())
    kinds = [(0, "full"), (0, "rows"), (1, "full"), (1, "sample"), (2, "sample")]
    assert found == [(step, call, *kind) for step in range(4) for call in range(2) for kind in kinds]
    assert run.table().num_rows == 8
    compact(run.path)
    assert len(list(open_run(run.path).tensors())) == len(found)
    assert run.tensor("a", 1, kind="sample", probe=1).shape == (2,)
    assert run.tensor("a", 1, kind="sample", probe=2).shape == (3,)


def test_which_tensor_is_meant(tmp_path: Path) -> None:
    """One is found by site, step, call and kind; errors say what there is instead."""
    run = kept(tmp_path)
    assert run.tensor("a", 1, kind="full").tolist() == (np.arange(12.0).reshape(4, 3) + 100).tolist()
    assert run.tensor("a:output", 2, kind="rows", call=1).tolist() == [[201, 202, 203]]
    assert run.tensor("a", 3, kind="full").shape == (4, 3)  # two probes kept it: the same
    with pytest.raises(RunError, match=r"several.*kind='full', rank=0, probe=0 or kind='rows'"):
        run.tensor("a", 0)
    with pytest.raises(RunError, match=r"several.*probe=1 or kind='sample', rank=0, probe=2"):
        run.tensor("a", 3, kind="sample")
    with pytest.raises(RunError, match=r"no tensor was kept of a:output at step 9.*nearest steps 3, 2"):
        run.tensor("a", 9)
    with pytest.raises(RunError, match="Did you mean 'a:output'"):
        run.tensor("a:outpt", 0)
    chosen = [key.step for key, _ in run.tensors("a", steps=(1, 3))]
    assert set(chosen) == {1, 2}
