"""Whether two runs are the same to the last bit, and where they are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import RunError

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
HASH = [tt.stats(), tt.hash()]


@pytest.fixture
def record(make_run):
    """Write a run of steps, each a mapping of arrays."""
    names = iter("abcdefgh")

    def write(*steps, keep=HASH, **more):
        return make_run([(step, {}) for step in steps], name=next(names), keep=keep, **more)

    return write


def flipped(x: np.ndarray) -> np.ndarray:
    """The lowest bit of one element, of which no statistic need tell."""
    changed = x.copy()
    changed.view(np.int32)[3, 3] ^= 1
    return changed


def test_the_same(record):
    """Equal runs are the same, and it is said how many sites and steps that is."""
    found = tt.diff(record({"a": X}, {"a": X * 2}), record({"a": X}, {"a": X * 2}), bitwise=True)
    assert found and found.headline == "the same to the last bit: 1 site, 2 steps"


def test_one_bit(record):
    """The first step and site are named, though every tolerance would allow it."""
    a = record({"a": X, "b": X}, {"a": X, "b": X, "c": X})
    b = record({"a": X, "b": X}, {"a": X, "b": flipped(X), "c": flipped(X)})
    assert tt.diff(a, b)
    found = tt.diff(a, b, bitwise=True)
    assert not found and (found.first.site, found.first.step) == ("b:output", 1)
    assert found.headline.startswith("not the same: first b:output at step 1")


def test_zeros_of_other_signs(record):
    """-0.0 is not 0.0: by the hash, and by all elements."""
    zeros = np.zeros(4, np.float32)
    for keep in (HASH, [tt.full()]):
        assert not tt.diff(record({"a": zeros}, keep=keep), record({"a": -zeros}, keep=keep), bitwise=True)


def test_without_a_hash(record):
    """Statistics are compared, and it is said that they are all there is."""
    found = tt.diff(record({"a": X}, keep=[tt.stats()]), record({"a": X}, keep=[tt.stats()]), bitwise=True)
    assert found and any("only statistics were compared of 1 site" in remark for remark in found.remarks())


def test_more_in_one(record):
    """A run that has more than the other is not the same."""
    found = tt.diff(record({"a": X, "b": X}), record({"a": X}), bitwise=True)
    assert not found and "one has more" in found.headline


def test_what_cannot_be_asked(record, make_run):
    """Tolerances, and layouts whose sums round otherwise."""
    a = record({"a": X})
    with pytest.raises(RunError, match="allows no difference"):
        tt.diff(a, a, bitwise=True, rtol=1e-3)
    for rank in (0, 1):
        spread = make_run([({"a": X[:4]}, {})], name="spread", rank=rank, keep=HASH)
    with pytest.raises(RunError, match="other layouts"):
        tt.diff(a, spread, bitwise=True)


def test_a_script_run_twice(tmp_path: Path):
    """A script that draws numbers without a seed is not deterministic: the layer that draws them is named."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))\n"
        "x = torch.randn(16, 4)\n"
        "torch.seed()\n"
        "model(x).sum().backward()\n"
    )
    words = [sys.executable, "-m", "tensortap", "run", "--twice", "--to", "out", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "not the same: first 1:output at step 0" in " ".join(done.stdout.split())
    assert tt.open(tmp_path / "out-first").steps == tt.open(tmp_path / "out-second").steps == [0]
