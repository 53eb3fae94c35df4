"""What `doctor` found, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.text import Text

from tensortap.doctor import Check
from tensortap.view import cells
from tensortap.view.terminal import Screen


def draw_checks(found: Sequence[Check], stream: IO[str] | None = None) -> None:
    """One line a check in its group; what to do comes below what is missing."""
    screen = Screen(stream)
    group = ""
    for check in found:
        if check.group != group:
            group = check.group
            screen.draw(Text(group, style="bold"))
        screen.draw(_line(check))
        if check.advice:
            screen.draw(Text(f"      {check.advice}", style=cells.WARN))


def _line(check: Check) -> Text:
    mark, style = ("✓", "green") if check.found and not check.advice else ("–", cells.WARN if check.advice else "dim")
    return Text.assemble("  ", (mark, style), f" {check.name:<12} ", check.found or ("not found", "dim"))
