"""What the documents say is true: their code runs, their links lead somewhere, their tables match the code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pytest
from warm_python import WarmPython

import tensortap as tt
from tensortap.store.catalog import PLAIN_METRICS, PLAIN_RECORDS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += sorted((ROOT / "docs" / "guides").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROSE = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")]
    if ".egg-info" not in str(path)
)
WIDEST = 100
LINK = re.compile(r"\[[^\]]*\]\(([^)]+)\)")


class Block(NamedTuple):
    language: str
    code: str
    where: str


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start(2))
        # Empty lines before the code, so that a traceback shows the document's own line numbers.
        yield Block(found[1], "\n" * line + found[2], f"{document.name}:{line + 1}")


def run_block(block: Block, names: dict[str, Any], python: WarmPython) -> None:
    if block.language == "python":
        if named := re.match(r"\s*# (\w+\.py)\n", block.code):
            Path(named[1]).write_text(block.code, encoding="utf-8")  # for the commands that follow
        exec(compile(block.code, block.where, "exec"), names)
    elif block.language == "sql":
        assert duckdb.connect().execute(block.code).fetchall(), block.where
    elif block.language == "console":
        for line in block.code.splitlines():
            if line.startswith("$ tensortap "):
                done = python.run(["-m", *shlex.split(line[2:])])
                assert done.returncode == 0, f"{block.where}: {line}\n{done.stderr}"


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def table_after(document: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its own head."""
    text = document.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export's own
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_code(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython) -> None:
    """Every block of Python, every query and every command in a document runs, one after the other, in a new folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(document):
        run_block(block, names, warm_python)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links(document: Path) -> None:
    """Every link leads to a file that is there, and to a heading in it."""
    for target in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        assert file.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{document.name}: {target}"


def test_columns() -> None:
    """The run folder's document lists exactly the columns of the schema, in order, with their types."""
    listed = [(name.strip("`"), kind) for name, kind, _ in table_after(ROOT / "docs" / "run-folder.md", "Records")]
    actual = [(field.name, kind_of(field.type)) for field in PLAIN_RECORDS]
    assert listed == actual


def kind_of(arrow: Any) -> str:
    """An Arrow type as the document writes it."""
    text = re.sub(r"<(?:item|element): ", "<", str(arrow)).replace("tz=", "")
    return re.sub(r"map<string, double.*", "map<string, double>", text)


def test_metric_columns() -> None:
    """The document names every column of the metrics."""
    text = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    sentence = next(part for part in text.split("\n\n") if part.startswith("Metrics have the columns"))
    assert set(re.findall(r"`(\w+)`", sentence)) == set(PLAIN_METRICS.names)


def test_modules() -> None:
    """The architecture document has a line for every module there is."""
    package = ROOT / "src" / "tensortap"
    there = {path.stem for path in package.iterdir() if (path.suffix == ".py" or path.is_dir())}
    there -= {"__init__", "__main__", "__pycache__"}
    listed = {row[0].strip("`") for row in table_after(ROOT / "docs" / "architecture.md", "Modules, from the top")}
    assert there - listed == set()


def test_names() -> None:
    """Every trigger and reducer there is stands in the document about them."""
    text = (ROOT / "docs" / "triggers-and-sites.md").read_text(encoding="utf-8")
    modules = ("tensortap.select.triggers", "tensortap.reduce.reducers", "tensortap.select.probes")
    makers = [name for name in tt.__all__ if name[0].islower() and getattr(tt, name).__module__.startswith(modules)]
    assert [name for name in makers if f"{name}(" not in text] == []


@pytest.mark.parametrize("document", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_clear_names(document: Path) -> None:
    """No document calls a name that shadows a builtin, or a variable `tap` beside `tt.tap`; the history may name it."""
    if document.name == "CHANGELOG.md":
        return
    assert re.findall(r"\b(?:tt|tensortap)\.(?:open|print|hash)\(", document.read_text(encoding="utf-8")) == []
    both = [
        block.where
        for block in blocks(document)
        if re.search(r"\btt\.tap\(", block.code) and re.search(r"\bas tap\b|\btap = ", block.code)
    ]
    assert both == []


@pytest.mark.parametrize("document", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(document: Path) -> None:
    """Prose, that is all but code, tables and lines without a space to break at, is wrapped at 100 columns."""
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), document.read_text(encoding="utf-8"))
    long = [
        f"{document.name}:{number}"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > WIDEST and not line.lstrip().startswith(("|", "![")) and " " in line.strip()[:WIDEST]
    ]
    assert long == []
