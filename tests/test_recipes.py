"""The recipes run as they stand, and what they claim about the outcome holds."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "recipes"
RECIPES = sorted(FOLDER.glob("[0-9]*.md"))
VARIANTS = [FOLDER / f"{framework}.md" for framework in ("keras", "jax", "numpy")]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own
@pytest.mark.parametrize("recipe", [*RECIPES, *VARIANTS], ids=lambda path: path.stem)
def test_recipe(recipe, tmp_path, monkeypatch):
    """Every block of a recipe runs in a new folder, and its assertions hold."""
    if "tensorboard" in recipe.stem:
        pytest.importorskip("tensorboard")
    if recipe in VARIANTS:
        pytest.importorskip(recipe.stem)
    monkeypatch.chdir(tmp_path)
    text = recipe.read_text(encoding="utf-8")
    names = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    assert blocks and all("assert" in block[1] for block in blocks)
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], recipe.name, "exec"), names)


def test_index():
    """The index lists every recipe under its own title, in order."""
    listed = re.findall(r"^\d+\. \[(.*)\]\((.*)\)$", (FOLDER / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    there = [(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "), path.name) for path in RECIPES]
    assert listed == there and len(there) == 15


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_short(recipe):
    """A recipe has at most 45 lines, prose and code, and none so long that it must be scrolled."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 120
