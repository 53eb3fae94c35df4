"""A small sample of what `benchmarks/layouts.py` runs: two ranks, four faults and three correct trainings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outside.layouts.judge import FAULTS, SCORED_FAULTS, correct_pairs, scored_pairs, verdicts

SAMPLE = (
    "router not reduced", "same dropout seed on tensor-parallel ranks", "parameter frozen on one rank",
    "fsdp2 fp32", "ddp2-accumulate2 bf16", "gradient of gates not summed", "scored ddp2 images bf16",
)  # fmt: skip
ALL = (*FAULTS, *correct_pairs(), *SCORED_FAULTS, *scored_pairs())
CASES = [case for case in ALL if case.name in SAMPLE]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the sample, recorded in one start."""
    out = tmp_path_factory.mktemp("layouts")
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)  # noqa: PTH100
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "outside.layouts", str(out), *SAMPLE]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts(recorded: Path, case) -> None:
    """A fault is named at its module, a correct training agrees with one process."""
    (verdict,) = verdicts([case], recorded)
    assert verdict.right, verdict.answer
