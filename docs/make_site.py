"""Assembles the documentation site's sources in build/docs: the pages of docs/, and references made from the code.

`make docs` runs it and then builds the site from what it wrote. The API reference has every public name, taken from
the docstrings; the command's reference is what `--help` says of every command.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

import tensortap as tt
from tensortap.cli import cli
from tensortap.cli.registry import COMMANDS, load_command

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "docs"
SOURCE = "https://github.com/tensortap/tensortap/blob/main"
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")  # pages of the site that lie beside docs/
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
# The sections of the API reference, by what the names in each are for.
SECTIONS = {
    "Watch": ("watch", "watch_step", "tap", "Tap", "Options", "ops"),
    "Look once": (
        "capture", "sites", "verify", "check_model", "rank_samples", "locate_nonfinite", "summarize", "Summary",
        "show", "print",
    ),
    "Choose what and when": (
        "probe", "Probe", "escalation", "Call", "Trigger", "every", "at", "between", "first", "powers_of", "chance",
        "metric", "nonfinite", "desync", "spike", "following",
    ),
    "Choose what to keep": (
        "stats", "histogram", "quantiles", "sample", "rows", "full", "units", "per_sample", "content_hash", "hash",
    ),
    "Read a run": ("open_run", "open", "Run", "Record", "compact"),
    "Diagnose and compare": ("findings", "Finding", "Findings", "Rule", "rule", "compare", "diff", "Diff"),
    "Harvest": ("harvest", "open_harvest", "Harvest", "Drift", "Ray", "tokens", "samples", "pooled", "top_k"),
    "Send it elsewhere": (
        "Memory", "Console", "Csv", "JsonLines", "Npy", "TensorBoard", "WandB", "Trackio", "MLflow", "OpenTelemetry",
        "Prometheus",
    ),
    "Errors and warnings": ("TensortapError", "TensortapWarning"),
}  # fmt: skip


def api_page() -> str:
    """Return the page with every public name, which mkdocstrings fills in."""
    lines = ["# API", "", f"`import tensortap as tt`, version {tt.__version__}.", ""]
    for title, names in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [*_entry(name), ""]
    return "\n".join(lines)


def _entry(name: str) -> list[str]:
    value = getattr(tt, name)
    own = value.__name__
    if own != name and hasattr(tt, own):  # `open` is `open_run`
        return [f"### `tt.{name}` {{ #tensortap.{name} }}", "", f"Another name of `tt.{own}`."]
    options = [] if own == name else ["    options:", f"      heading: {name}", f"      toc_label: {name}"]
    return [f"::: {value.__module__}.{own}", *options]


def cli_page() -> str:
    """Return the page with the help of every command."""
    lines = ["# The command", "", "```text", "tensortap COMMAND …", "```", ""]
    for name in COMMANDS:
        for words, command in _with_actions(name, load_command(name)):
            context = click.Context(command, info_name=words, parent=click.Context(cli, info_name="tensortap"))
            lines += [
                f"{'#' * (1 + len(words.split()[:2]))} {words}",
                "",
                "```text",
                command.get_help(context),
                "```",
                "",
            ]
    return "\n".join(lines)


def _with_actions(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        for name, action in command.commands.items():
            yield from _with_actions(f"{words} {name}", action)


def page(path: Path) -> str:
    """Return a page as the site has it: what lies beside docs/ is a page too, all else is linked at its source."""
    here = path.parent if path.is_relative_to(ROOT / "docs") else ROOT / "docs"

    def moved(link: re.Match[str]) -> str:
        target = link[2]
        if "://" in target:
            return link[0]
        file = (path.parent / target).resolve()
        if file == ROOT / "README.md":
            return f"{link[1]}{_up(here)}index.md{link[3]}"
        if file.parent == ROOT and file.name in BESIDE:
            return f"{link[1]}{_up(here)}{file.name}{link[3]}"
        if file.is_relative_to(ROOT / "docs"):
            return f"{link[1]}{_up(here)}{file.relative_to(ROOT / 'docs')}{link[3]}"
        return f"{link[1]}{SOURCE}/{file.relative_to(ROOT)}{link[3]}"

    return LINK.sub(moved, path.read_text(encoding="utf-8"))


def _up(here: Path) -> str:
    return "../" * len(here.relative_to(ROOT / "docs").parts)


def main() -> None:
    """Write everything anew."""
    shutil.rmtree(TARGET, ignore_errors=True)
    for path in sorted((ROOT / "docs").rglob("*")):
        there = TARGET / path.relative_to(ROOT / "docs")
        there.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            there.write_text(page(path), encoding="utf-8")
        elif path.suffix in (".svg", ".png", ".css"):
            shutil.copyfile(path, there)
    for name in BESIDE:
        (TARGET / name).write_text(page(ROOT / name), encoding="utf-8")
    (TARGET / "reference").mkdir()
    (TARGET / "reference" / "api.md").write_text(api_page(), encoding="utf-8")
    (TARGET / "reference" / "cli.md").write_text(cli_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
