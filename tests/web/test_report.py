"""The report: one file, the same page, no server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensortap.cli import cli

sync_api = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def report(built: Path, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of the digits, written by the command."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    done = CliRunner().invoke(cli, ["report", str(recorded / "digits"), "-o", str(path)])
    assert done.exit_code == 0, done.output
    return path.as_uri()


def test_every_page_works_without_a_server(report, visit, heat):
    """All pages but the comparison draw from what the file carries, and nothing is fetched."""
    page = visit(report, new=True)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    assert "deep.2:output" in heat(page).ready(18).hover(9, 0.5)
    sync_api.expect(page.locator(".finding", has_text="dead units")).to_be_visible()
    page.mouse.click(*heat(page).place(0, 0.5))
    sync_api.expect(page.locator("h1")).to_have_text("stem.0:output")
    sync_api.expect(page.locator(".chart-title", has_text="Quantiles")).to_have_count(2)
    page.keyboard.press("3")
    sync_api.expect(page.locator("output")).to_have_text(re.compile(r"step \d+"))
    page.keyboard.press("5")
    sync_api.expect(page.locator(".finding", has_text="dead units")).to_be_visible()
    page.keyboard.press("6")
    sync_api.expect(page.get_by_text("What observing cost")).to_be_visible()
    assert asked == [report]


def test_filter_port_and_zoom_crop_what_is_there(report, visit, heat):
    """The same patterns choose rows, ports and steps of what the file carries."""
    page = visit(f"{report}#/overview?sites=type:ReLU&port=grad_output&from=10&to=19")
    assert "step 10" in heat(page).ready(4).hover(0, 0.01)
    for pattern, rows in {
        "block.*": 3,
        "block.**": 4,
        "deep.{0,2}": 2,
        "re:.*conv.*": 2,
        "head": 1,
        "stem.0:output": 1,
    }.items():
        page.get_by_label("Port", exact=True).select_option(
            "all" if ":" in pattern and "re:" not in pattern else "output"
        )
        page.get_by_label("Filter sites").fill(pattern)
        heat(page).ready(rows)


def test_it_does_not_carry_everything_and_says_so(report, visit):
    """What a report cannot show says how to see it."""
    page = visit(f"{report}#/diff")
    sync_api.expect(page.get_by_text("There is only one run here")).to_be_visible()
