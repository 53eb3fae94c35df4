"""What `doctor` found, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import IO

from rich.text import Text

from tensortap.adapters.capabilities import FEATURES, Capabilities
from tensortap.cli.doctor import Check
from tensortap.view.terminal import cells
from tensortap.view.terminal.columns import Column, grid
from tensortap.view.terminal.screen import Screen


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


def draw_capabilities(found: Sequence[Capabilities], stream: IO[str] | None = None) -> None:
    """What can be seen of each framework; below it what cannot, with what to do instead."""
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
