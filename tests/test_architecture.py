"""Measured promises of the source tree: small classes and files, one name for one thing, plain words."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tensortap"
FILES = sorted(SOURCE.rglob("*.py"))
WRITTEN = ("src/tensortap", "tests", "web/src", "benchmarks", "docs", "examples")  # folders of code, in any language
LANGUAGES = (".py", ".ts", ".css", ".js")  # C aside
MOST_METHODS = 19
MOST_LINES = 400
TESTS = Path(__file__).resolve().parent
NOT_OF_A_PACKAGE = ("outside", "web", "adapters/contract", "adapters/torch/helpers", "store/fixtures")
MOST_POSITIONAL = 7
IN_C = ("record", "record_if_room", "commit")  # functions of the C kernel, which are called for every tensor
COINED = (
    "taker|takers|placing|placings|lending|standin|standins|echoes|bystander|watchman|ledger|veil|vault|ladder|"
    "twin|wish|seeds|carried|shelf"
)
# What is not true yet. These lists only get shorter.
LARGE_CLASSES: set[str] = set()
LONG_FILES: set[str] = set()
SHARED_NAMES: set[str] = set()
COINED_NAMES: set[str] = set()


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                yield name(path), node


def identifiers(path: Path) -> set[str]:
    """The names of a file's functions, classes, parameters and variables, as words."""
    names: set[str] = {path.stem}
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    words = (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", each).lower().split("_") for each in names)
    return {word for some in words for word in some}


def test_small_classes() -> None:
    """No class has 20 methods."""
    large = set()
    for path, node in classes():
        methods = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
        if len({item.name for item in methods}) > MOST_METHODS:
            large.add(f"{path}:{node.name}")
    assert large <= LARGE_CLASSES


def test_short_files() -> None:
    """No file has more than 400 lines, be it the package's, a test, a page's or a benchmark."""
    files = [path for folder in WRITTEN for path in (ROOT / folder).rglob("*") if path.suffix in LANGUAGES]
    own = [path for path in files if "static" not in path.parts]  # the page as it was built
    long = {str(path.relative_to(ROOT)) for path in own if len(path.read_text("utf-8").splitlines()) > MOST_LINES}
    assert long <= LONG_FILES


def test_one_name_one_class() -> None:
    """No class name is used twice, be it public or private."""
    places = defaultdict(set)
    for path, node in classes():
        places[node.name].add(path)
    assert {each for each, paths in places.items() if len(paths) > 1} <= SHARED_NAMES


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("__init__.py")), ids=name)
def test_packages_say_what_they_hold(path: Path) -> None:
    """Every package has a docstring that says what it holds and what it may import."""
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert said and re.search(r"\b[Ii]mport", said)


def test_few_arguments_by_position() -> None:
    """No call has eight arguments by position: what belongs together has a name."""
    long = [
        f"{name(path)}:{node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL and _called(node) not in IN_C
    ]
    assert long == []


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def test_private_names_stay_at_home() -> None:
    """No module imports an underscore name of another module of ours."""
    reached = [
        f"{name(path)}:{each.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensortap")
        for each in node.names
        if each.name.startswith("_") and each.name not in ("_kernel", "__version__")
    ]
    assert reached == []


def test_the_tests_mirror_the_packages() -> None:
    """Every folder with tests is named after the package that it tests, but for helpers and subjects of others."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}
    unknown = [each for each in folders if not (SOURCE / each).is_dir()]
    assert [each for each in unknown if not each.as_posix().startswith(NOT_OF_A_PACKAGE)] == []


def test_plain_words() -> None:
    """No identifier has a coined word in it."""
    coined = re.compile(f"^(?:{COINED})$")
    found = {f"{name(path)}:{word}" for path in FILES for word in identifiers(path) if coined.match(word)}
    assert found <= COINED_NAMES
