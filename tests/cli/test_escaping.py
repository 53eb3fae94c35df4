"""Text that comes from a run steers neither a terminal nor a spreadsheet."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tensortap as tt
from tensortap.cli.app import cli
from tensortap.sinks.export import export

HOSTILE = "\x1b[2Jlayer\nerror: all is well\r"


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run whose sites have hostile names."""
    with tt.watch(to=tmp_path / "run") as tap:
        for name in (HOSTILE, "=cmd|' /C calc'!A0", "plain"):
            tt.tap(np.ones(3), name)
        tap.step(**{HOSTILE: 1.0})
    return str(tap.path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "RUN"), ("show", "RUN", "--site", "nosuch"), ("show", "RUN", "--site", "\x1b[31mnosuch"),
        ("check", "RUN"), ("show", f"RUN{HOSTILE}"), ("diff", "RUN", "RUN"), ("show", "RUN", "--site", "layer"),
        ("explain", "RUN"), ("doctor", "RUN"), ("ctl", "RUN", "status"), ("ctl", f"RUN{HOSTILE}", "note", HOSTILE),
        ("show", "RUN", "--json"), ("export", "RUN", "--to", "jsonl", "-o", f"RUN{HOSTILE}x/y"),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_printed_steers_the_terminal(run: str, arguments: tuple[str, ...]) -> None:
    """Neither listings nor errors contain control characters of a run's names."""
    result = CliRunner().invoke(cli, [word.replace("RUN", run) for word in arguments])
    assert "\x1b[2J" not in result.output and "\x1b[31m" not in result.output and "\r" not in result.output
    assert "\nerror: all is well" not in result.output


def test_cells_are_text_to_a_spreadsheet(run: str, tmp_path: Path) -> None:
    """A cell that would be taken for a formula begins with a quote; numbers stay numbers."""
    export(tt.open(run), "csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["site"][0] for row in rows if "cmd" in row["site"]] == ["'"]
    assert all(cell[:1] not in "=+@" or not cell for row in rows for cell in row.values())
    assert [row["site"] for row in rows if row["site"] == "plain"] and rows[0]["mean"] == "1.0"
