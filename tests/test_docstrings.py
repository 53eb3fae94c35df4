"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"


def with_examples() -> list[str]:
    """Return the modules that have examples, found without importing any."""
    files = [path for path in sorted(SOURCE.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in files]


@pytest.mark.parametrize("name", with_examples())
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example of a module gives what is written below it."""
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    runner = doctest.DocTestRunner()
    failed = sum(runner.run(examples).failed for examples in found)
    assert found and not failed, f"{failed} examples failed: see the output"
