"""`tensortap doctor`: what is installed and active, what each framework supports, what is missing.

No framework is imported for it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from typing import IO, Any, Final, NamedTuple

import click
from rich.text import Text

from tensortap.adapters import registry
from tensortap.adapters.capabilities import FEATURES, Capabilities
from tensortap.cli.options import json_option, print_json
from tensortap.reduce import kernel as kernels
from tensortap.version import __version__
from tensortap.view.terminal import formats
from tensortap.view.terminal.columns import Column, grid
from tensortap.view.terminal.screen import Screen

BASE: Final = ("numpy", "pyarrow", "ml_dtypes", "safetensors", "fsspec", "rich", "click")
FRAMEWORKS: Final = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "keras": ("keras",),
    "jax": ("jax",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "sklearn": ("scikit-learn",),
}
# Package: what it is for, and how to get it.
EXTRAS: Final = {
    "duckdb": ("run.sql(…)", "pip install 'tensortap[query]'"),
    "onnx": ("watching ONNX Runtime sessions", "pip install 'tensortap[onnx]'"),
    "starlette": ("tensortap view", "pip install 'tensortap[view]'"),
    "uvicorn": ("tensortap view", "pip install 'tensortap[view]'"),
    "s3fs": ("runs at s3://…", "pip install s3fs"),
    "tensorboard": ("TensorBoard(…)", "pip install 'tensortap[tensorboard]'"),
}
_REBUILD: Final = "install a C compiler (e.g. apt install gcc), then: pip install --force-reinstall --no-deps tensortap"


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Print what is installed, what each framework supports, and what is missing."""
    found = checks()
    if as_json:
        print_json(checks_json(found))
    else:
        draw_checks(found)
        draw_capabilities(registry.table())


class Check(NamedTuple):
    """One thing that was checked; `advice` is empty when nothing need be done."""

    group: str
    name: str
    found: str
    advice: str = ""


def checks() -> list[Check]:
    """Return every check, in groups."""
    return [*_kernel(), *_versions(), *_frameworks(), *_extras()]


def checks_json(found: list[Check]) -> dict[str, Any]:
    """Return the same as plain values: what was found (null when missing), capabilities, advice."""
    groups: dict[str, dict[str, str | None]] = {}
    for check in found:
        groups.setdefault(check.group, {})[check.name] = check.found or None
    given = {c.name: {f: c.lacks.get(f, True) for f in FEATURES} for c in registry.table()}
    return {**groups, "capabilities": given, "advice": {check.name: check.advice for check in found if check.advice}}


def _kernel() -> list[Check]:
    slow = kernels.ACTIVE == "numpy"
    return [
        Check("kernel", "active", kernels.ACTIVE, f"the same results, but slower; {_REBUILD}" * slow),
        Check("kernel", "threads", f"{kernels.threads()} of {os.cpu_count()} CPUs"),
    ]


def _versions() -> list[Check]:
    python = Check("versions", "python", f"{platform.python_version()} ({platform.platform()})")
    ours = Check("versions", "tensortap", __version__)
    return [ours, python, *(_package("versions", name, (name,), f"pip install {name}") for name in BASE)]


def _frameworks() -> list[Check]:
    return [_package("frameworks", name, packages, "") for name, packages in FRAMEWORKS.items()]


def _extras() -> list[Check]:
    return [_package("extras", name, (name,), f"needed for {use}: {how}") for name, (use, how) in EXTRAS.items()]


def _package(group: str, name: str, packages: tuple[str, ...], advice: str) -> Check:
    found = next(filter(None, map(version, packages)), "") or ("version unknown" if _importable(name) else "")
    return Check(group, name, found, "" if found else advice)


def version(package: str) -> str:
    """Return an installed package's version; empty when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def draw_checks(found: Sequence[Check], stream: IO[str] | None = None) -> None:
    """Draw one line for each check in its group, with advice below what is missing."""
    screen = Screen(stream)
    group = ""
    for check in found:
        if check.group != group:
            group = check.group
            screen.draw(Text(group, style="bold"))
        screen.draw(_line(check))
        if check.advice:
            screen.draw(Text(f"      {check.advice}", style=formats.WARN))


def _line(check: Check) -> Text:
    mark, style = ("✓", "green") if check.found and not check.advice else ("–", formats.WARN if check.advice else "dim")
    return Text.assemble("  ", (mark, style), f" {check.name:<12} ", check.found or ("not found", "dim"))


def draw_capabilities(found: Sequence[Capabilities], stream: IO[str] | None = None) -> None:
    """Draw what can be observed in each framework; below it what cannot, and what to do instead."""
    screen = Screen(stream)
    columns = [Column("what can be seen", _feature, 99, left=True)]
    columns += [Column(c.name, partial(_given, c), 50, partial(_given_style, c), left=True) for c in found]
    screen.draw(grid(columns, list(FEATURES), screen.width))
    for each in found:
        for instead, features in each.refusals().items():
            screen.draw(Text(f"  {each.name}, no {', '.join(features)}: {instead}".replace("`", ""), style="dim"))


def _feature(feature: str) -> str:
    return f"  {FEATURES[feature].replace('`', '')}"


def _given(capabilities: Capabilities, feature: str) -> str:
    return "✓" if capabilities.gives(feature) else "–"


def _given_style(capabilities: Capabilities, feature: str) -> str:
    return "green" if capabilities.gives(feature) else "dim"
