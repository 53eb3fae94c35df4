"""Measured promises of the source tree: small classes and files, one name for one thing, plain words."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "tensortap"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_METHODS = 19
MOST_LINES = 400
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
    """No file has more than 400 lines."""
    long = {name(path) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES}
    assert long <= LONG_FILES


def test_one_name_one_class() -> None:
    """No public class name is used twice."""
    places = defaultdict(set)
    for path, node in classes():
        if not node.name.startswith("_"):
            places[node.name].add(path)
    assert {each for each, paths in places.items() if len(paths) > 1} <= SHARED_NAMES


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("__init__.py")), ids=name)
def test_packages_say_what_they_hold(path: Path) -> None:
    """Every package has a docstring."""
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_plain_words() -> None:
    """No identifier has a coined word in it."""
    coined = re.compile(f"^(?:{COINED})$")
    found = {f"{name(path)}:{word}" for path in FILES for word in identifiers(path) if coined.match(word)}
    assert found <= COINED_NAMES
