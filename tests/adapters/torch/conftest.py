"""A watched model whose records are kept in memory, and a comparison of them with tensors caught by hand."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from warm_python import WarmPython

import tensortap as tt

_DEVICE_PATH = bool(os.environ.get("TENSORTAP_DEVICE_PATH"))  # most of these tests hold on the way of a device too


class Seen:
    """A tap and what it recorded."""

    def __init__(self, tap: tt.Tap, memory: tt.Memory) -> None:
        self.tap = tap
        self.memory = memory

    @property
    def records(self) -> list[tt.Record]:
        self.tap.flush()
        return sorted(self.memory.records, key=lambda record: (record.step, record.seq))

    def of(self, place: str, **columns: Any) -> list[tt.Record]:
        """The records of one place, in order of call, with these values in these columns."""
        found = [r for r in self.records if str(r.place) == place and all(r[k] == v for k, v in columns.items())]
        return sorted(found, key=lambda record: (record.step, record.recomputed, record.call, record.seq))

    def one(self, place: str, **columns: Any) -> tt.Record:
        (found,) = self.of(place, **columns)
        return found

    @property
    def places(self) -> list[str]:
        return [str(record.place) for record in self.records]

    @property
    def steps(self) -> list[int]:
        return sorted({record.step for record in self.records})

    def unseen(self) -> dict[str, str]:
        assert self.tap._adapter is not None
        return self.tap._adapter.unseen()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing is compiled before a test, nor do other tests think so afterwards."""
    _forget_compiled()
    yield
    _forget_compiled()


def _forget_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def watch() -> Iterator[Callable[..., Seen]]:
    """`watch(model, *probes)` as tt.watch, into memory; closed at the end whatever happens."""
    taps: list[tt.Tap] = []

    def begin(model: Any, *probes: Any, **options: Any) -> Seen:
        memory = tt.Memory()
        taps.append(tt.watch(model, *probes, to=memory, **options))
        return Seen(taps[-1], memory)

    yield begin
    for tap in taps:
        tap.close()


def same(record: tt.Record, tensor: torch.Tensor) -> bool:
    """Whether a record holds exactly the statistics of a tensor."""
    expected = tt.summarize(tensor.detach())
    names = [name for name in expected if not name.startswith("hist")]
    equal = all(_equal(record[name], expected[name]) for name in names)
    if record["hist_counts"] is None:
        return equal
    return equal and record["hist_counts"].tolist() == expected["hist_counts"].tolist()


def _equal(a: Any, b: Any) -> bool:
    if _DEVICE_PATH and isinstance(a, float):  # its sums are taken in another order
        return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@pytest.fixture(name="same")
def _same() -> Callable[[tt.Record, torch.Tensor], bool]:
    return same


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """The same numbers in every test, and none that thinks anything is compiled because an earlier one compiled."""
    torch.manual_seed(0)
    yield
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


PARALLEL = Path(__file__).parent / "distributed" / "parallel"
collect_ignore = ["distributed/parallel"]  # scripts that torchrun starts


class Played(NamedTuple):
    """One scenario: what each rank wrote down by hand, and the run."""

    results: list[dict[str, Any]]
    path: Path

    @property
    def run(self) -> tt.Run:
        return tt.open(self.path)


@pytest.fixture(name="torchrun", scope="session")
def _torchrun() -> Callable[..., subprocess.CompletedProcess[str]]:
    return torchrun


def torchrun(
    out: Path, ranks: int, script: str, *more: str, check: bool = True
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Start a script on so many ranks."""
    by = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)  # noqa: PTH100
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, *by, str(PARALLEL / script), str(out), *more]
    done = subprocess.run(words, env=env, cwd=out, capture_output=True, text=True, timeout=150, check=False)
    assert not check or done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.fixture(scope="session")
def ranks_folder(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, warm_python: WarmPython
) -> Path:
    """What all scenarios wrote: they are played in one start, which has imported PyTorch and forks the ranks."""
    out = tmp_path_factory.mktemp("ranks")
    thorough = request.config.option.markexpr != "not thorough"
    done = warm_python.run([PARALLEL / "world.py", out, *(["thorough"] if thorough else [])], out, 150)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="session")
def play(ranks_folder: Path) -> Callable[[int, str], Played]:
    """`play(ranks, name)`: a scenario's results."""

    def get(ranks: int, name: str) -> Played:
        out = ranks_folder / str(ranks)
        results = [json.loads((out / f"{rank}.json").read_text())[name] for rank in range(ranks)]
        for result in results:
            assert "error" not in result, result["error"]
        return Played(results, out / name)

    return get
