"""`tensortap check --model`: what it prints and how it exits."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tensortap.cli import cli

FACTORIES = """
import torch
from torch import nn

def right():
    return nn.Linear(4, 3), torch.randn(8, 4)

def mixing():
    return {"model": nn.Softmax(dim=0), "batch": torch.randn(8, 4)}

def unused():
    class Net(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.spare = nn.Linear(2, 2)
    return Net(), torch.randn(8, 4), torch.arange(8) % 3, nn.CrossEntropyLoss()

def nothing():
    return None

def failing():
    return nn.Linear(4, 3), torch.randn(8, 5)
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "made_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def call(*words):
    return CliRunner().invoke(cli, ["check", *words])


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("right", (), 0),
        ("mixing", (), 1),
        ("unused", (), 0),
        ("unused", ("--fail-on", "warning"), 1),
        ("unused", ("--fail-on", "warning", "--rule", "samples_mixed"), 0),
        ("nothing", (), 2),
        ("missing", (), 2),
        ("failing", (), 2),
        ("right", ("--rule", "no_such"), 2),
    ],
)
def test_exit_codes(factories, name, options, code):
    """0 when nothing is as bad as --fail-on, 1 when something is, 2 when it cannot be told."""
    assert call("--model", f"made_models:{name}", *options).exit_code == code


def test_what_is_printed(factories):
    """The findings, the worst first, as text and as JSON."""
    said = call("--model", "made_models:mixing").output
    assert "samples_mixed" in said and "made_models:mixing" in said
    found = json.loads(call("--model", "made_models:mixing", "--json").stdout)
    assert found["failed"] and found["findings"][0]["rule"] == "samples_mixed"


def test_a_run_or_a_model():
    """Neither or both is a usage error."""
    assert call().exit_code == 2 and call("runs/a", "--model", "a:b").exit_code == 2
