"""A small sample of what `benchmarks/layouts.py` runs: two ranks, faults and correct trainings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warm_python import WarmPython

import tensortap as tt
from outside.layouts.judge import FAULTS, SCORED_FAULTS, correct_pairs, scored_pairs, verdicts

SAMPLE = ("same dropout seed on tensor-parallel ranks", "fsdp2 fp32")
MORE = (
    "router not reduced",
    "ddp2-accumulate2 bf16",
    "parameter frozen on one rank",
    "gradient of gates not summed",
    "scored ddp2 images bf16",
)  # `make thorough`
ALL = {case.name: case for case in (*FAULTS, *correct_pairs(), *SCORED_FAULTS, *scored_pairs())}
CASES = [ALL[name] for name in SAMPLE] + [pytest.param(ALL[name], marks=pytest.mark.thorough) for name in MORE]


def script_of_the_document() -> str:
    """What docs/layouts.md tells a user of FSDP2 to write."""
    text = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(# spread\.py\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, warm_python: WarmPython) -> Path:
    """The runs of the sample, recorded in one start."""
    out = tmp_path_factory.mktemp("layouts")
    names = SAMPLE if request.config.option.markexpr == "not thorough" else (*SAMPLE, *MORE)
    (out / "spread.py").write_text(script_of_the_document())
    done = warm_python.run(["-m", "outside.layouts", out, *names], out, 300)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts(recorded: Path, case) -> None:
    """A fault is named at its module, a correct training agrees with one process."""
    (verdict,) = verdicts([case], recorded)
    assert verdict.right, verdict.answer


def test_the_script_of_the_document(recorded: Path) -> None:
    """The script in docs/layouts.md gives two runs that agree, put together from what FSDP2's ranks hold."""
    found = tt.diff(recorded / "runs" / "on-1", recorded / "runs" / "on-2")
    assert found and found.layouts.startswith("a one process, b dp 2") and len(found.steps) == 3
