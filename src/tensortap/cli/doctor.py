"""`tensortap doctor`: what is installed and active, what each framework supports, what is missing.

No framework is imported for it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import IO, Any, Final, NamedTuple

import click
from rich.text import Text

from tensortap.adapters import registry
from tensortap.adapters.capabilities import FEATURES, Capabilities
from tensortap.cli.errors import FAILED
from tensortap.cli.options import json_option, print_json
from tensortap.reduce import kernel as kernels
from tensortap.store import facts
from tensortap.store.names import DAMAGED
from tensortap.store.run import open_run
from tensortap.store.snapshot import Snapshot
from tensortap.text import printable
from tensortap.version import __version__
from tensortap.view.terminal import formats
from tensortap.view.terminal.columns import Column, grid
from tensortap.view.terminal.overview import about
from tensortap.view.terminal.progress import waiting
from tensortap.view.terminal.screen import Screen, counts_lines

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
@click.argument("path", metavar="[RUN]", required=False)
@json_option
def command(path: str | None, as_json: bool) -> None:
    """Print what is installed, what each framework supports, and what is missing.

    With a RUN, say what is wrong with its files.

    Every file of the run is read to its end, and checksums are verified. Exits with 1 when something is damaged.
    """
    if path is not None:
        _examine(path, as_json)
        return
    found = checks()
    if as_json:
        print_json(checks_json(found))
    else:
        draw_checks(found)
        draw_capabilities(registry.table())


def _examine(path: str, as_json: bool) -> None:
    """Read a run to its end, print what cannot be read and what was counted."""
    with waiting(f"reading {path}"):
        run = open_run(path)
        run.snapshots.read(facts.read_to_the_end)
        said = run.snapshots.read(_state_of_files)
    if as_json:
        print_json(said)
    else:
        draw_damage(said)
    if said["damage"] or any(name.startswith("missing_") for name in said["counts"]):
        raise click.exceptions.Exit(FAILED)


def _state_of_files(snapshot: Snapshot) -> dict[str, Any]:
    damage = facts.damage(snapshot)
    return {**about(snapshot), "damage": damage, "kept_aside": [name for name in damage if name.endswith(DAMAGED)]}


def draw_damage(said: Mapping[str, Any], stream: IO[str] | None = None) -> None:
    """Draw the state of a run's files: a line for each that cannot be read, then what was counted."""
    screen = Screen(stream)
    screen.draw(Text(printable(f"{said['path']} · {said['state']}"), style="bold"))
    for name, reason in said["damage"].items():
        screen.draw(Text(printable(f"  {name}: {reason}"), style=formats.ALARM))
    screen.draw(*counts_lines(said["counts"]))
    if not said["damage"]:
        screen.draw(Text("  every file can be read to its end", style="green"))


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
