"""The examples in the repository are healthy, and the fault that one of them can plant is found."""

import subprocess
import sys
from pathlib import Path

import pytest

import tensortap as tt

EXAMPLES = Path(__file__).parents[2] / "examples"
SITES = [part for site in ("**", "**:grad", "**:grad_output", "**:update") for part in ("--sites", site)]


def observed(script, tmp_path, *arguments):
    """Run an example under observation; its run."""
    command = [sys.executable, "-m", "tensortap", "run", *SITES, "--to", str(tmp_path / "run")]
    subprocess.run([*command, str(EXAMPLES / script), *arguments], check=True, capture_output=True, timeout=240)
    return tt.open(tmp_path / "run")


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("digits_cnn.py", ["--epochs", "2"]), ("small_gpt.py", ["--steps", "60"]), ("serve.py", ["--requests", "50"])],
)
def test_a_healthy_example_raises_no_warning(script, arguments, tmp_path):
    """A training or serving that goes well has nothing at warning or above."""
    found = [f for f in observed(script, tmp_path, *arguments).findings() if f.severity != "info"]
    assert not found, found


def test_the_planted_fault_is_named_at_its_site(tmp_path):
    """A ReLU that was killed on purpose is what the rules find, and where."""
    findings = observed("digits_cnn.py", tmp_path, "--epochs", "1", "--fault", "dead-relu").findings()
    assert ("dead_units", "block.relu:output") in {(f.rule, f.site) for f in findings if f.severity != "info"}
