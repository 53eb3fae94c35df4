"""Runs recorded by version 1 stay readable, with the same numbers."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

import pyarrow.compute as pc
import pytest

import tensortap as tt
from tensortap.store.run import open_run
from tensortap.view.api.service import Api

sys.path.insert(0, str(Path(__file__).parent))
from version1 import numbers_of

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A copy of the run that version 1 recorded."""
    return Path(shutil.copytree(FIXTURES / "v1", tmp_path / "v1"))


def known() -> str:
    """What version 1 read from it."""
    return json.dumps(json.loads(gzip.decompress((FIXTURES / "v1.json.gz").read_bytes())))


def test_the_same_numbers_as_version_1(recorded: Path) -> None:
    """Records, metrics, series, merged rows and kept tensors are those that version 1 read, bit for bit."""
    run = open_run(recorded)
    assert json.dumps(numbers_of(run)) == known()
    assert {(row["phase"], row["owner"]) for row in run.metrics().to_pylist()} == {(None, None)}


def test_the_same_numbers_once_it_is_compacted(recorded: Path) -> None:
    """Sealing the tails of version 1 and folding its segments changes no number."""
    tt.compact(recorded)
    found, was = json.loads(json.dumps(numbers_of(open_run(recorded)))), json.loads(known())
    order = lambda row: json.dumps(row)  # noqa: E731  # sorting is stable only within one file
    for name in ("records", "metrics", "tensors", "merged"):
        assert sorted(map(order, found[name])) == sorted(map(order, was[name])), name
    assert json.dumps(found["series"]) == json.dumps(was["series"])


def test_the_viewer_shows_magnitudes_that_version_1_did_not_write(recorded: Path) -> None:
    """By depth a step has the greatest magnitude of each output, which is derived from its ends."""
    run, api = open_run(recorded), Api(str(recorded))
    for step in run.steps:
        largest: dict[str, float] = {}
        for row in run.table(ports="output", steps=step).filter(~pc.field("recomputed")).to_pylist():
            for end in (abs(row[name]) for name in ("min", "max") if row[name] is not None):
                largest[f"{row['site']}:output"] = max(end, largest.get(f"{row['site']}:output", 0.0))
        shown = {site["site"]: site["absmax"] for site in api.answer("/api/depth", {"step": str(step)})["sites"]}
        assert shown == {name: largest.get(name) for name in shown} and set(largest) <= set(shown)
        assert bool(largest) == (step % 3 != 2)  # its third steps are NaN throughout
    api.close()
