"""The documentation site has every page, every public name and every command."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import tensortap as tt
from tensortap.cli.registry import COMMANDS, load_command

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "make_site.py"))


def test_the_reference_is_complete(site: dict[str, Any]) -> None:
    """Every public name is on the API page, once, under the object that it is."""
    listed = [name for names in site["SECTIONS"].values() for name in names]
    assert sorted(listed) == sorted(set(tt.__all__) - {"__version__"})
    text = site["api_page"]()
    for name in listed:
        value = getattr(tt, name)
        assert f"::: {value.__module__}.{value.__name__}\n" in text or f"#tensortap.{name} " in text, name
        assert (value.__doc__ or "").strip(), name


def test_the_command_is_complete(site: dict[str, Any]) -> None:
    """Every command, every action of `ctl` and every option is on the command's page."""
    text = site["cli_page"]()
    for name in COMMANDS:
        for words, command in site["_with_actions"](name, load_command(name)):
            assert f"# {words}\n" in text
            options = [option for p in command.params if isinstance(p, click.Option) for option in p.opts]
            help_text = text.split(f"# {words}\n")[1].split("\n#")[0]
            assert [option for option in options if option not in help_text] == []


def test_every_page_is_in_the_navigation(site: dict[str, Any]) -> None:
    """No page is left out of the site, and no page is named that is not there."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/.-]+\.md", yaml.dump(yaml.safe_load(config)["nav"])))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert named == there | set(site["BESIDE"]) | {"reference/api.md", "reference/cli.md"}
    assert (ROOT / "docs" / "pipeline.svg").exists()


def test_links_lead_out_of_the_folder(site: dict[str, Any]) -> None:
    """What lies beside docs/ is a page of the site or is linked at its source."""
    text = site["page"](ROOT / "docs" / "index.md")
    assert "](CONTRIBUTING.md)" in text and "](../" not in text
    assert "](docs/" not in site["page"](ROOT / "CONTRIBUTING.md")
