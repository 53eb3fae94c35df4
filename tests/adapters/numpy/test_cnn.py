"""The example: a convolutional network in pure NumPy with three layers tapped in inference."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tensortap as tt

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "numpy_cnn.py"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """What it prints, and its run."""
    folder = tmp_path_factory.mktemp("cnn")
    command = [sys.executable, str(EXAMPLE), "--batches", "11", "--to", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, tt.open(folder / "run")


def test_the_layers_that_were_asked_for(example):
    """ReLU_1, MaxPool_2 and FC_1 are there in every batch, and nothing else."""
    _, run = example
    assert sorted(str(place) for place in run.sites) == ["FC_1:output", "MaxPool_2:output", "ReLU_1:output"]
    assert run.table().num_rows == 33 and run.counts == {}
    shapes = {record.place.site: record["shape"] for record in run.records()}
    assert shapes == {"ReLU_1": (16, 8, 24, 24), "MaxPool_2": (16, 16, 6, 6), "FC_1": (16, 4)}


def test_the_numbers_are_those_of_the_layers(example):
    """The logits kept of batches 0 and 10 are what the network computes without taps, bit for bit."""
    _, run = example
    names = runpy.run_path(str(EXAMPLE))
    rng = np.random.default_rng(0)
    network = names["Network"](rng)
    logits = [network(names["pictures"](rng)) for _ in range(11)]
    kept = [run.tensor("FC_1", step=step) for step in (0, 10)]
    assert [array.tobytes() for array in kept] == [logits[0].tobytes(), logits[10].tobytes()]


def test_what_it_prints(example):
    """A table of three layers, a picture of a feature map, and where the run is."""
    said, _ = example
    assert all(name in said for name in ("11 batches", "ReLU_1", "MaxPool_2", "FC_1", "#", "tensortap show run"))
    assert max(map(len, said.splitlines())) <= 100
