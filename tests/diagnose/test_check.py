"""`tensortap check`: what one reads first, JSON, and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tensortap as tt
from tensortap.cli import cli
from tensortap.diagnose import REGISTRY
from tensortap.diagnose.attribution import one_for_each_cause
from tensortap.finding import Finding
from tensortap.view.terminal.findings import check_run


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def check(*args: Any) -> Any:
    return CliRunner().invoke(cli, ["check", *map(str, args)])


def test_worst_first(zoo: Any) -> None:
    """The first line names the most severe finding and where it is; nothing is wider than the terminal."""
    done = check(zoo.run("rate_that_grows").path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("error  metric loss  loss_spike  steps 2")
    assert lines[2].startswith("  → ")
    assert max(map(len, lines)) <= 100
    assert done.stdout.index("warning") > done.stdout.index("error")
    assert "1 error" in done.stdout
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("name", "level", "code"),
    [
        ("bad_batch", "error", 1),
        ("raw_pixels", "error", 0),
        ("raw_pixels", "warning", 1),
        ("healthy_mlp", "warning", 0),
        ("healthy_mlp", "info", 1),
        ("healthy_tanh", "info", 0),
    ],
)
def test_exit_code(zoo: Any, name: str, level: str, code: int) -> None:
    """1 when there is a finding of the level or above, otherwise 0; the JSON says the same."""
    done = check(zoo.run(name).path, "--fail-on", level, "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout)["failed"] is bool(code)


def test_json(zoo: Any, fault: str) -> None:
    """Everything is plain JSON without NaN, and each finding has all its parts."""
    plain = json.dumps(check_run(zoo.run(fault)).as_json(failed=True), allow_nan=False)
    said = json.loads(plain)
    assert set(said["rules"]) | set(said["skipped"]) == set(REGISTRY)
    for finding in said["findings"]:
        parts = {"rule", "severity", "site", "steps", "evidence", "message", "advice"}
        assert set(finding) == parts | {"code", "places", "consequences"}


def test_one_rule(zoo: Any) -> None:
    """Only the rules asked for look; one that does not exist is answered with the nearest."""
    path = zoo.run("rate_that_grows").path
    done = check(path, "--rule", "dead_units", "--rule", "outliers")
    assert "loss_spike" not in done.stdout
    assert "found by 2 rules" in done.stdout
    wrong = check(path, "--rule", "dead_unit")
    assert wrong.exit_code == 2
    assert "Did you mean 'dead_units'" in wrong.stderr


def test_rule_of_the_users(zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule in a file of the current folder is named as module:name."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("house_rules.py").write_text(
        "def odd(snapshot):\n    yield snapshot.sites('output')[0].finding(None, 'It is odd.')\n"
    )
    path = zoo.run("healthy_tanh").path
    done = check(path, "--rule", "house_rules:odd", "--fail-on", "warning")
    assert done.exit_code == 1
    assert done.stdout.startswith("warning  0:output  odd\n  It is odd.")
    assert check(path, "--rule", "house_rules:even").exit_code == 2
    assert check(path, "--rule", "no_such_module:odd").exit_code == 2


def test_reference(zoo: Any) -> None:
    """With a reference run, drift is looked for."""
    path, before = zoo.run("inputs_shifted").path, zoo.run("healthy_mlp").path
    assert "no data: " in check(path).stdout
    done = check(path, "--reference", before, "--rule", "drift", "--fail-on", "warning")
    assert done.exit_code == 1
    assert "stability index" in done.stdout


def test_nothing_found(zoo: Any) -> None:
    """A run without findings says so, and what could not be judged; `--all` says why."""
    path = zoo.run("healthy_tanh").path
    done = check(path, "--all")
    assert "nothing found by" in done.stdout
    assert "no data: drift: no reference run was given" in done.stdout
    line = next(line for line in check(path).stdout.splitlines() if line.startswith("no data"))
    assert re.fullmatch(r"no data: \d+ rules; --all names them, and says why", line)


def test_no_run(tmp_path: Path) -> None:
    """A path that holds no run cannot be judged: 2, and a line that says so."""
    done = check(tmp_path)
    assert done.exit_code == 2
    assert "holds no run" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_does_not_fit_is_a_pattern_that_show_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `check` prints of a long site can be given to `show --site`."""
    monkeypatch.setenv("COLUMNS", "60")
    run = tmp_path / "run"
    with tt.watch(to=run) as tap:
        for _ in range(5):
            for layer in range(3):
                bad = np.full(4, np.nan if layer == 1 else 1.0)
                tt.tap(bad, f"bert.encoder.layer.{layer}.attention.self.query.projection")
            tap.step()
    found = re.search(r"^error  (\S+)  nonfinite", check(run).stdout)
    assert found and found[1].startswith("**.")
    shown = CliRunner().invoke(cli, ["show", str(run), "--site", found[1], "--json"])
    assert shown.exit_code == 0 and "layer.1" in shown.stdout and "layer.0" not in shown.stdout


def test_an_error_does_not_hide_under_a_warning() -> None:
    """A cause is as severe as the worst of what follows from it, so that the exit code sees that too."""
    given = [Finding("poor_initialisation", "warning", "a:param", None, {}, "too large"),
             Finding("nonfinite", "error", "a:output", None, {}, "NaN")]  # fmt: skip
    (found,) = one_for_each_cause(given)
    assert (found.rule, found.severity, [f.rule for f in found.consequences]) == (
        "poor_initialisation", "error", ["nonfinite"],
    )  # fmt: skip
