"""The example scripts, which know nothing of us: what they print under `tensortap run`, and what it finds in them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tensortap as tt

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "digits_cnn.py": ["--epochs", "1"],
    "small_gpt.py": ["--steps", "4", "--layers", "2", "--tell", "4"],
    "serve.py": ["--requests", "60"],
}


def python(*words, cwd):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done


def observed(name, *args, cwd, options=()):
    return python("-m", "tensortap", "run", "--to", "out", *options, ROOT / "examples" / name, *args, cwd=cwd)


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request, tmp_path_factory):
    """An example's name, what it prints, what it prints under observation, and the run."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("example")
    alone = python(ROOT / "examples" / request.param, *EXAMPLES[request.param], cwd=folder)
    done = observed(request.param, *EXAMPLES[request.param], cwd=folder)
    return request.param, alone.stdout, done.stdout, tt.open(folder / "out")


def test_the_same_with_and_without(example):
    """Losses, accuracies and answers are printed to many digits, and every digit is the same."""
    _, alone, seen, _ = example
    assert seen == alone != ""


def test_what_is_found(example):
    """Every step of training, testing and serving is there, complete."""
    name, _, _, run = example
    steps = {record.step: record.phase for record in run.records()}
    phases = list(steps.values())
    sites = {"digits_cnn.py": 13, "small_gpt.py": 18, "serve.py": 7}[name]
    expected = {"digits_cnn.py": (24, 3), "small_gpt.py": (4, 6), "serve.py": (0, 60)}[name]
    assert (phases.count("train"), phases.count("eval")) == expected
    assert len(run.sites) == sites
    assert run.table().num_rows == sites * len(steps)
    assert len(run.metrics()) == expected[0] or name == "digits_cnn.py"
    assert run.counts == {}


def test_examples_know_nothing():
    """None of them mentions us."""
    assert [name for name in EXAMPLES if "tensortap" in (ROOT / "examples" / name).read_text()] == []


def test_the_dead_relu(tmp_path):
    """The planted fault is the first row of the table, although accuracy does not show it."""
    observed("digits_cnn.py", "--epochs", "1", "--fault", "dead-relu", cwd=tmp_path, options=["--keep", "stats"])
    table = python("-m", "tensortap", "show", "out", cwd=tmp_path).stdout.splitlines()
    first = table[next(i for i, line in enumerate(table) if line.startswith("site")) + 1]
    assert first.startswith("block.relu:output") and "100%" in first


def test_the_explosion(tmp_path):
    """A learning rate that grows ends in NaN, and the last words say where it was first."""
    done = observed("digits_cnn.py", "--fault", "explode", cwd=tmp_path, options=["--keep", "stats"])
    assert "NaN or Inf, first at step" in done.stderr
