"""`tensortap diff`, as a user meets it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from tensortap.cli import cli
from tensortap.reduce.reducers import full, histogram

X = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
KEEP = [histogram(), full()]


@pytest.fixture
def runs(make_run):
    """Two runs that part at step 1 in `enc.1`; a third with other names."""
    names = [f"enc.{i}" for i in range(30)]
    good = dict.fromkeys(names, X)
    bad = good | {name: X * (1 + 0.001 * i) for i, name in enumerate(names)}
    renamed = {name.replace("enc", "encoder.layer"): x for name, x in good.items()}
    return {
        "a": make_run([(good, {}), (good, {})], name="a", keep=KEEP),
        "b": make_run([(good, {}), (bad, {})], name="b", keep=KEEP),
        "c": make_run([(renamed, {})], name="c", keep=KEEP),
    }


def call(*args, **more):
    return CliRunner().invoke(cli, ["diff", *map(str, args)], **more)


def test_same(runs):
    """Exit 0, and a sentence."""
    result = call(runs["a"], runs["a"])
    assert result.exit_code == 0, result.output
    assert "same within tolerance, bit for bit as far as was recorded: 30 sites, 2 steps" in result.output


def test_differs(runs):
    """Exit 1; the headline names the first divergence and by how much; no line is wider than the terminal."""
    result = call(runs["a"], runs["b"], env={"COLUMNS": "100"})
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    headline = next(i for i, line in enumerate(lines) if line.startswith("differs first"))
    assert lines[headline].startswith("differs first in enc.1:output at step 1: off by 0.0007")
    assert "29 of 30 sites differ" in lines[headline + 1]
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("site")) + 1 :]
    assert rows[0].startswith("▶ enc.1:output")  # no room for it among the 20 worst
    assert rows[1].startswith("  enc.29:output")
    assert rows[20] == "… 10 more sites; --limit 0 shows all"


def test_limit(runs):
    """All sites when asked for, or a few."""
    for limit, count in ((0, 30), (3, 3)):
        output = call(runs["a"], runs["b"], "--limit", limit).output
        assert sum(":output  " in line for line in output.splitlines()) == count


def test_json(runs):
    """The same as strict JSON, with the same exit code."""
    result = call(runs["a"], runs["b"], "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["first"]["site"] == "enc.1:output" and len(found["rows"]) == 30


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--step", "0"], 0),
        (["--step", "-1"], 1),
        (["--site", "enc.0"], 0),
        (["--site", "enc.1"], 1),
        (["--rtol", "0.1"], 0),
        (["--atol", "1"], 0),
    ],
)
def test_options(runs, args, code):
    """Steps, sites and tolerances are the user's."""
    assert call(runs["a"], runs["b"], *args).exit_code == code


def test_map(runs):
    """Renames are given as OLD=NEW."""
    result = call(runs["a"], runs["c"], "--map", "enc=encoder.layer", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["aligned_by"] == "name"
    assert json.loads(call(runs["a"], runs["c"], "--json").stdout)["aligned_by"] == "order"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["{a}"], "Missing argument"),
        (["{a}", "{a}nothing"], "nothing"),
        (["{a}", "{b}", "--map", "enc"], "OLD=NEW"),
        (["{a}", "{b}", "--map", "ecn=enc"], "enc"),
        (["{a}", "{b}", "--site", "encc.0"], "enc.0:output"),
        (["{a}", "{b}", "--step", "7"], "--step 1"),
        (["{a}", "{b}", "--rtol", "-1"], "x>=0"),
    ],
)
def test_errors(runs, args, said):
    """Exit 2, which is neither the same nor different; short, on stderr, and naming what would work."""
    result = call(*(arg.format(**runs) for arg in args))
    assert result.exit_code == 2, result.output
    assert said in result.stderr and "Traceback" not in result.output
    assert result.stdout == ""
