"""Depth, diff, findings, cost, the list of runs, and what all pages have in common."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

import tensortap as tt

sync_api = pytest.importorskip("playwright.sync_api")
ROOT = Path(__file__).resolve().parents[2]


def test_depth_shows_one_step_and_can_be_played(at, recorded):
    """The table of a step holds its scales; playing from the first step moves on by itself; the address follows."""
    page = at("#/depth?run=digits&step=30")
    sync_api.expect(page.locator("output")).to_have_text("step 30")
    sync_api.expect(page.locator(".chart .wrong").first).to_contain_text("exactly 0: block.relu:output")
    page.get_by_text("Table").click()
    cells = page.locator("main tbody tr", has_text="head.3:output").locator("td")
    value = tt.open(str(recorded / "digits")).series("head.3", "std")[1][30]
    assert float(cells.nth(2).inner_text()) == pytest.approx(value, rel=1e-4)
    page.keyboard.press("Home")
    sync_api.expect(page.locator("output")).to_have_text("step 0")
    page.keyboard.press("Space")
    sync_api.expect(page.locator("output")).to_have_text(re.compile("step ([4-9]|[1-5][0-9])"))
    page.keyboard.press("Space")
    page.wait_for_url(re.compile("step=([4-9]|[1-5][0-9])"))


def test_diff_marks_where_two_runs_part(at, heat):
    """A run beside one that learns faster: where they first part is said, and a cell tells how far."""
    page = at("#/diff?run=digits")
    page.get_by_label("Second run").select_option("digits-faster")
    shown = heat(page).ready()
    sync_api.expect(page.locator("h1")).to_contain_text("They part first in stem.0.weight:update at step 0")
    assert "times the tolerance" in shown.hover(17, 0.99)
    assert "b=digits-faster" in page.url
    page.mouse.click(*shown.place(17, 0.99))
    page.wait_for_url("**#/site**")
    sync_api.expect(page.locator("h1")).to_have_text("DigitsNet:output")


def test_findings_page_has_evidence_and_advice(at):
    """Each finding stands with its evidence and advice, and rules without data say why."""
    page = at("#/findings?run=digits")
    dead = page.locator(".finding", has_text="dead units").filter(has_text="block.relu:output")
    sync_api.expect(dead).to_contain_text("of 32768 elements are zero")
    dead.get_by_text("Evidence").click()
    sync_api.expect(dead.locator("dl")).to_be_visible()
    sync_api.expect(page.get_by_text("Rules that had no data")).to_be_visible()


def test_cost_page_names_the_dearest_sites(at):
    """What observing cost is there in all and by site, and what was not seen."""
    page = at("#/cost?run=digits")
    sync_api.expect(page.get_by_text(re.compile(r"in all.* of the time of the steps"))).to_be_visible()
    sync_api.expect(page.locator("main tbody tr")).to_have_count(72)
    sync_api.expect(page.get_by_text("What was not seen")).to_be_visible()


def test_runs_are_listed_and_lead_to_their_overview(at, heat):
    """A folder shows its runs with their state; a click opens one."""
    page = at("")
    sync_api.expect(page.locator("main tbody tr")).to_have_count(12)
    sync_api.expect(page.locator("tr", has_text="crashed").locator(".badge")).to_have_text("crashed")
    page.get_by_role("link", name="digits-faster").click()
    heat(page).ready(18)


@pytest.mark.thorough  # keys have a test in test_overview.py
def test_number_keys_go_through_the_pages(at):
    """Keys 1 to 6 open the six pages of a run, and the bar shows which."""
    page = at("#/overview?run=digits")
    sync_api.expect(page.locator("nav a")).to_have_count(6)
    for key, name in enumerate(["Overview", "Site", "Depth", "Diff", "Findings", "Cost"], 1):
        page.keyboard.press(str(key))
        sync_api.expect(page.locator("nav [aria-current=page]")).to_have_text(name)
        sync_api.expect(page.locator(".state", has_text="Reading")).to_have_count(0)


def test_theme_can_be_chosen_and_is_remembered(at, heat):
    """The button goes from the system's theme to light to dark; a reload keeps it; cells are drawn anew."""
    page = at("#/overview?run=digits&stat=mean")
    shown = heat(page).ready(18)
    page.get_by_role("button", name="Theme: system").click()
    light = shown.colour(4, 0.5)
    page.get_by_role("button", name="Theme: light").click()
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    page.reload()
    sync_api.expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert sum(shown.ready(18).colour(4, 0.5)) < sum(light)  # zero, the neutral middle of a diverging scale


def test_page_weighs_less_than_it_may(built):
    """Everything the browser loads is under 300 kB, compressed."""
    files = [path for path in built.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < 300_000
    assert len([path for path in files if path.suffix == ".js"]) == 1


def test_nothing_from_a_run_becomes_html():
    """No source of the page writes HTML from text."""
    sources = "\n".join(path.read_text() for path in (ROOT / "web" / "src").glob("*.ts"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|DOMParser|new Function", sources
    )


def test_lockfile_is_whole_and_names_no_host():
    """All that `npm ci` installs, on any platform, is pinned by version and hash, wherever it comes from."""
    text = (ROOT / "web" / "package-lock.json").read_text()
    packages = json.loads(text)["packages"]
    kinds = ("dependencies", "devDependencies", "optionalDependencies")
    wanted = {name for package in packages.values() for kind in kinds for name in package.get(kind, {})}
    assert {name for name in wanted if f"node_modules/{name}" not in packages} == set()
    assert all("integrity" in package for path, package in packages.items() if path)
    assert "resolved" not in text


@pytest.mark.thorough  # tables have a test in test_site.py
def test_the_tables_of_metrics_and_differences(at, recorded):
    """Behind the curves of metrics stand their values, behind the map of differences each site with its verdict."""
    page = at("#/overview?run=digits")
    table = page.locator(".table", has_text="metrics by step")
    table.locator("summary").click()
    found = [row for row in tt.open(str(recorded / "digits")).metrics().to_pylist() if row["name"] == "loss"]
    sync_api.expect(table.locator("tbody tr")).to_have_count(len(found))
    at_loss = table.locator("thead th").all_inner_texts().index("loss")
    shown = float(table.locator("tbody tr").nth(0).locator("td").nth(at_loss).inner_text())
    assert shown == pytest.approx(found[0]["value"], rel=1e-3)
    page = at("#/diff?run=digits&b=digits-faster")
    table = page.locator(".table", has_text="sites that were compared")
    table.locator("summary").click()
    sync_api.expect(table.locator("tbody tr", has_text="stem.0.weight:update").first).to_be_visible()
