"""The example scripts, which know nothing of us: what they print under `tensortap run`, and what it finds in them."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import tensortap as tt

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "digits_cnn.py": ["--epochs", "1"],
    "small_gpt.py": ["--steps", "4", "--layers", "2", "--tell", "4"],
    "serve.py": ["--requests", "60"],
}


@pytest.fixture(scope="module")
def python(warm_python):
    """Run `python WORDS` in a folder."""

    def run(*words, cwd):
        done = warm_python.run(words, cwd)
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def observed(python):
    """Run an example under `tensortap run`."""

    def run(name, *args, cwd, options=()):
        return python("-m", "tensortap", "run", "--to", "out", *options, ROOT / "examples" / name, *args, cwd=cwd)

    return run


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request, tmp_path_factory, python, observed):
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
    outputs = [record for record in run.records() if record.place.port == "output"]
    rows = Counter((record.phase, record.step) for record in outputs)  # each phase has its own numbers
    steps = set(rows)
    phases = [phase for phase, _ in steps]
    sites = {"digits_cnn.py": 15, "small_gpt.py": 21, "serve.py": 8}[name]
    expected = {"digits_cnn.py": (24, 3), "small_gpt.py": (4, 6), "serve.py": (0, 60)}[name]
    assert (phases.count("train"), phases.count("eval")) == expected
    assert sum(":output" in site for site in run.sites) == sites
    assert set(rows.values()) == {sites}
    assert len(run.metrics()) == expected[0] or name == "digits_cnn.py"
    assert run.counts == {}


def test_examples_know_nothing():
    """None of them mentions us."""
    assert [name for name in EXAMPLES if "tensortap" in (ROOT / "examples" / name).read_text()] == []


@pytest.mark.skipif(not (Path(sys.executable).parent / "tensortap").exists(), reason="the command is not installed")
def test_make_demo(tmp_path):
    """The planted fault is the table's first row and what the rules find; run and report are there, nothing opens."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "browser").write_text(f"#!/bin/sh\ntouch {tmp_path}/opened\n")
    (tmp_path / "browser").chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "BROWSER": str(tmp_path / "browser")}
    words = [
        "make",
        "--no-print-directory",
        "-f",
        ROOT / "Makefile",
        "-o",
        ".venv/.demo",
        f"BIN={Path(sys.executable).parent}",
        "demo",
    ]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=True)
    said = done.stdout.splitlines()
    first = said[next(i for i, line in enumerate(said) if line.startswith("site ")) + 1]
    assert first.startswith("block.relu:output") and "100%" in first
    assert any(line.startswith("warning  block.relu:output  dead_units") for line in said)
    report = tmp_path / "runs" / "demo" / "report.html"
    assert (report.is_file() and said[-1].endswith("runs/demo/report.html")) or "Node" in done.stderr
    assert "the run is in runs/demo" in done.stdout and not (tmp_path / "opened").exists()


def test_the_explosion(tmp_path, observed):
    """A learning rate that grows ends in NaN, and the last words say where it was first."""
    done = observed("digits_cnn.py", "--fault", "explode", cwd=tmp_path, options=["--keep", "stats"])
    assert "NaN or Inf, first at step" in done.stderr
