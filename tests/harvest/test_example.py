"""The example that trains a sparse autoencoder on harvested activations."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def test_sparse_autoencoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains, harvests and trains, and its features explain most of the layer."""
    monkeypatch.syspath_prepend(EXAMPLES)
    words = ["--steps", "10", "--passes", "2", "--to", str(tmp_path / "acts")]
    monkeypatch.setattr(sys, "argv", ["sparse_autoencoder.py", *words])
    runpy.run_path(str(EXAMPLES / "sparse_autoencoder.py"), run_name="__main__")
    said = capsys.readouterr().out
    explained = float(re.search(r"explain ([\d.]+)%", said)[1])  # type: ignore[index]
    assert explained > 50
