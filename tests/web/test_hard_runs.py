"""Runs that are not as one would like: NaN everywhere, empty, crashed, huge, hostile, gone."""

from __future__ import annotations

import re

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
LOUD = (180, 0, 255, 255)


def test_nan_everywhere_is_loud(at, heat):
    """Cells in which nothing is finite have the colour that nothing else has, and say so; the loss says it too."""
    page = at("#/overview?run=nan")
    shown = heat(page).ready(5)
    shown.wait_for_colour([(row, share) for row in range(5) for share in (0.1, 0.9)], LOUD)
    assert "NaN or Inf" in shown.hover(2, 0.5)
    sync_api.expect(page.locator(".metrics .wrong")).to_contain_text("NaN or Inf from step 0")
    for other in ("site", "depth", "findings", "cost"):
        page.goto(page.url.replace("#/overview", f"#/{other}").replace("#/site", f"#/{other}"))
        sync_api.expect(page.locator(".state.failed")).to_have_count(0)


def test_no_record_is_neither_zero_nor_nan(at, heat):
    """Where a site has no record the hatched ground shows; a zero has the scale's lowest colour."""
    page = at("#/overview?run=attention&stat=l2&sites=re:silent|late")
    shown = heat(page).ready(2)
    silent, late = (0, 1) if "silent" in shown.hover(0, 0.9) else (1, 0)
    assert shown.colour(silent, 0.1) == shown.colour(silent, 0.9) == (0, 32, 77, 255)
    assert shown.colour(late, 0.9)[3] == 255 and shown.colour(late, 0.1) in {(0, 0, 0, 0), (227, 227, 223, 255)}
    assert "no record" in shown.hover(late, 0.1)


@pytest.mark.parametrize(
    "name", ["overview", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("site", "depth"))]
)
def test_an_empty_run_says_what_to_do(at, name):
    """A run without a step says so on every page, and how one is recorded."""
    page = at(f"#/{name}?run=empty")
    sync_api.expect(page.get_by_text("This run holds no steps")).to_be_visible()
    sync_api.expect(page.get_by_text("tt.watch(model)")).to_be_visible()


def test_a_crashed_run_shows_all_it_kept(at, heat):
    """A killed process's run is marked as crashed, and its last completed step is there."""
    page = at("#/overview?run=crashed")
    assert "step 11" in heat(page).ready(2).hover(1, 0.999)
    sync_api.expect(page.locator(".badge")).to_have_text("crashed, 12 steps")


def test_half_a_million_records_scroll_and_zoom(at, heat):
    """500 sites × 1 000 steps: the last row can be reached, and a zoom reads single steps."""
    page = at("#/overview?run=large&level=all")
    shown = heat(page).ready(500)
    page.locator(".heat-scroll").evaluate("(one) => one.scrollTo(0, one.scrollHeight)")
    box = shown.canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 30, box["y"] + box["height"] - 2)
    sync_api.expect(shown.element.locator(".tip")).to_contain_text("blocks.49.drop:output")
    page.locator(".heat-scroll").evaluate("(one) => one.scrollTo(0, 0)")  # under a mouse that does not move
    sync_api.expect(shown.element.locator(".tip")).to_contain_text("blocks.2.")
    page.goto(page.url.split("&from")[0] + "&from=500&to=519")
    shown.ready(500).hover(0, 0.3)
    sync_api.expect(shown.element.locator(".tip")).to_contain_text(re.compile(r"step 50\d"))  # once the map is zoomed
    page.keyboard.press("/")
    page.keyboard.type("blocks.49.*")
    shown.ready(3)


def test_hostile_names_are_text(at, heat):
    """HTML in names of sites and metrics is shown as it is written, on every page, and never runs."""
    page = at("#/overview?run=hostile")
    assert "<img src=x onerror=" in heat(page).ready(5).hover(0, 0.5)
    sync_api.expect(page.locator(".metrics .chart-title")).to_have_text("<i>loss</i>")
    for other in ("site", "depth", "findings", "cost"):
        page.goto(re.sub(r"#/\w+", f"#/{other}", page.url))
        sync_api.expect(page.locator("nav [aria-current=page]")).to_have_text(other.capitalize())
        sync_api.expect(page.locator(".state", has_text="Reading")).to_have_count(0)
        assert page.locator("main img, main b b, main script").count() == 0
    page.keyboard.press("1")
    page.mouse.click(*heat(page).ready(5).place(0, 0.5))
    sync_api.expect(page.locator("h1")).to_contain_text("<img src=x onerror=")
    assert "hacked" not in page.title()


@pytest.mark.parametrize("where", ["overview", "cost"])
def test_long_names_of_what_was_not_seen_are_whole(at, where):
    """A long name of what was not seen is shown as it is written, and wraps: nothing scrolls sideways."""
    page = at(f"#/{where}?run=hostile")
    name = page.locator("dl.facts dt", has_text="blocks_of_the_model." + "never_named_" * 20)
    sync_api.expect(name).to_be_visible()
    for box in page.locator(".aside, main, dl.facts").all():
        assert box.evaluate("(one) => one.scrollWidth - one.clientWidth") <= 0
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_an_unknown_run_says_so(at):
    """An address with a run that is not there gives the reason and a way to those that are."""
    page = at("#/overview?run=nowhere", expect="404")
    sync_api.expect(page.locator(".state.failed")).to_be_visible()
    page.get_by_role("link", name="All runs").click()
    sync_api.expect(page.locator("main tbody tr")).to_have_count(12)
