"""The examples in the repository are healthy, and the fault that one of them can plant is found."""

from pathlib import Path

import pytest

import tensortap as tt

EXAMPLES = Path(__file__).parents[2] / "examples"
SITES = [part for site in ("**", "**:grad", "**:grad_output", "**:update") for part in ("--sites", site)]


@pytest.fixture
def observed(warm_python, tmp_path):
    """Run an example under observation; its run."""

    def observe(script, *arguments):
        command = ["-m", "tensortap", "run", *SITES, "--to", "run", EXAMPLES / script, *arguments]
        assert warm_python.run(command, tmp_path).returncode == 0
        return tt.open(tmp_path / "run")

    return observe


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("digits_cnn.py", ["--epochs", "2"]), ("small_gpt.py", ["--steps", "60"]), ("serve.py", ["--requests", "50"])],
)
def test_a_healthy_example_raises_no_warning(script, arguments, observed):
    """A training or serving that goes well has nothing at warning or above."""
    found = [f for f in observed(script, *arguments).findings() if f.severity != "info"]
    assert not found, found


def test_the_planted_fault_is_named_at_its_site(observed):
    """A ReLU that was killed on purpose is what the rules find, and where."""
    findings = observed("digits_cnn.py", "--epochs", "1", "--fault", "dead-relu").findings()
    assert ("dead_units", "block.relu:output") in {(f.rule, f.site) for f in findings if f.severity != "info"}
