"""What is wrong, first: the sentence, the time line, ranks, the module tree, the list of runs, and every width."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
PAGES = {
    "runs": "#/runs",
    "overview": "#/overview?run=jump",
    "ranks": "#/overview?run=four_ranks",
    "site": "#/site?run=jump&site=layers.0.norm1:output",
    "depth": "#/depth?run=jump",
    "diff": "#/diff?run=digits&b=digits-faster",
    "findings": "#/findings?run=jump",
    "cost": "#/cost?run=digits",
    "empty": "#/overview?run=empty",
}
READY = {
    "runs": ".spark", "overview": ".finding", "ranks": ".rank-note", "site": ".chart canvas", "depth": ".chart canvas",
    "diff": ".diff-key .legend", "findings": ".finding", "cost": "main table", "empty": ".state",
}  # fmt: skip

# How far the page is wider than the window, before anything in it is drawn again at its new width.
WATCH_OVERFLOW = """() => addEventListener("resize", () => {
    window.overflow = Math.max(window.overflow ?? 0, document.documentElement.scrollWidth - innerWidth);
})"""


def test_one_sentence_and_one_card_for_a_cause(at):
    """The overview says what happened in a sentence, and nineteen layers with NaN are one card, the cause on top."""
    page = at(PAGES["overview"])
    said = page.locator(".headline")
    sync_api.expect(said).to_contain_text("the learning rate rose ×1e6 at step 4")
    assert re.search(r"learning rate rose .*; (NaN|Inf) from step 4\d, first in layers\.", said.inner_text())
    sync_api.expect(page.locator(".aside .finding", has=page.locator("b", has_text="nonfinite"))).to_have_count(1)
    label = page.locator(".timeline").get_attribute("aria-label")
    assert "learning rate rose" in label and "checkpoint model.pt" in label


def test_a_rank_that_differs_is_seen_and_chosen(at, heat):
    """The strip above the heat map names the rank that is off; one rank, or their spread, can be chosen."""
    page = at(PAGES["ranks"])
    heat(page).ready(6)
    sync_api.expect(page.locator(".rank-note")).to_contain_text("Rank 2 differs")
    page.get_by_label("Rank", exact=True).select_option("2")
    said = heat(page).ready(6).hover(0, 0.5)
    assert 1.3 < float(said.rsplit(" ", 1)[1]) < 1.9
    page.get_by_label("Rank", exact=True).select_option("spread")
    sync_api.expect(page.locator(".legend-title")).to_contain_text("spread over ranks")


def test_a_tree_of_modules_is_collapsed_until_every_row_has_a_name(at, heat):
    """Five hundred sites open as modules, each named; a click opens one, and all sites can be shown."""
    page = at("#/overview?run=large")
    shown = heat(page).ready()
    few = int(shown.element.get_attribute("data-rows"))
    assert few < 100 and float(shown.element.get_attribute("data-row")) >= 12
    x, y = shown.place(1, 0)
    page.mouse.click(x - 60, y)
    page.wait_for_function(f"() => +document.querySelector('.heat').dataset.rows > {few}")
    assert "open=" in page.url
    page.get_by_label("Module tree").select_option("all")
    heat(page).ready(500)
    assert float(shown.element.get_attribute("data-row")) >= 12


def test_site_charts_show_what_one_huge_value_would_hide(at):
    """Axes are robust unless told otherwise, NaN has its own colour, and histograms are ridgelines on request."""
    page = at("#/overview?run=jump")
    violet = """() => [...document.querySelectorAll(".chart canvas")].some((one) => {
        const data = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
        for (let i = 0; i < data.length; i += 4)
            if (data[i] === 180 && data[i + 1] === 0 && data[i + 2] === 255) return true;
        return false; })"""
    page.wait_for_function(violet)
    page.goto(page.url.replace("#/overview?run=jump", "") + PAGES["site"])
    page.wait_for_function(violet)
    for mode in ("symlog", "all", "robust"):
        page.get_by_label("Y axis").select_option(mode)
        sync_api.expect(page.locator(".chart canvas").first).to_be_visible()
    page.get_by_role("button", name="ridgelines").first.click()
    sync_api.expect(page.locator(".ridges canvas").first).to_be_visible()
    page.get_by_role("button", name="log buckets").first.click()
    page.get_by_text("How to read it").first.click()
    sync_api.expect(page.get_by_text("Buckets are logarithmic").first).to_be_visible()


def test_depth_opens_where_nan_begins(at):
    """Without a step in the address the depth page opens at the first step that is not finite, and says why."""
    page = at(PAGES["depth"])
    sync_api.expect(page.locator(".play")).to_contain_text("NaN or Inf begins here")


def test_runs_are_filtered_sorted_noted_and_overlaid(at, recorded, heat):
    """The list tells NaN from fine, keeps tags beside the runs, and draws several runs into one chart."""
    page = at(PAGES["runs"])
    rows = page.locator("main tbody tr")
    sync_api.expect(rows.filter(has_text="raised").locator(".badge")).to_have_text("ended by ZeroDivisionError")
    sync_api.expect(
        page.locator("tr", has=page.get_by_role("link", name="jump", exact=True)).locator(".badge")
    ).to_contain_text("NaN from")
    page.get_by_label("Filter runs").fill("digits")
    sync_api.expect(rows).to_have_count(2)
    page.get_by_label("tags and note of digits-faster").click()
    page.get_by_label("Tags of digits-faster").fill("baseline, lr")
    page.get_by_role("button", name="Keep").click()
    sync_api.expect(page.locator(".tag")).to_have_count(2)
    kept = json.loads((recorded / "tensortap-notes.json").read_text())
    assert kept["runs"]["digits-faster"]["tags"] == ["baseline", "lr"]
    page.get_by_label("Sort by steps").click()
    page.get_by_label("Choose digits", exact=True).check()
    page.get_by_label("Choose digits-faster", exact=True).check()
    page.get_by_role("link", name="Overlay in charts").click()
    heat(page).ready(18)
    sync_api.expect(page.locator(".chart-readout", has_text="digits-faster").first).to_be_visible()
    page.get_by_label("Smoothing").fill("0.9")
    sync_api.expect(page).to_have_url(re.compile("smooth=0.9"))


def test_numbers_and_pictures_can_be_kept(at, heat):
    """A table is saved as CSV with every step, a chart as PNG."""
    page = at("#/overview?run=digits")
    heat(page).ready(18)
    table = page.locator(".table", has_text="metrics by step")
    table.locator("summary").click()
    with page.expect_download() as found:
        table.get_by_role("button", name="Save as CSV").click()
    rows = list(csv.reader(Path(found.value.path()).read_text().splitlines()))
    assert rows[0][:2] == ["step", "accuracy"] or "loss" in rows[0]
    assert len(rows) == 61
    page.locator(".key").hover()
    with page.expect_download() as found:
        page.locator(".key").get_by_role("button", name="Save as PNG").click()
    assert Path(found.value.path()).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_every_width_and_are_accessible(at, name, picture, violations):
    """From a phone to a wide screen nothing overflows, the room is used, and axe finds nothing, light or dark."""
    page = at(PAGES[name], size=(390, 844))
    page.locator(READY[name]).first.wait_for(state="attached")
    sync_api.expect(page.locator(".state", has_text="Reading")).to_have_count(0)
    for width, height, scheme in ((390, 844, "light"), (1024, 700, "light"), (1280, 800, "dark"), (2560, 1440, "dark")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function(f"() => document.documentElement.scrollWidth <= {width}")
        assert page.locator("main").bounding_box()["width"] > 0.8 * width
        picture(page, f"{name}-{width}")
        if name in ("runs", "cost"):  # no scrolling sideways
            assert page.locator(".wide").evaluate("(box) => box.scrollWidth - box.clientWidth") <= 0
        if width in (390, 2560):
            assert violations(page) == []
    page.evaluate(WATCH_OVERFLOW)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("() => window.overflow !== undefined && innerWidth === 390")
    assert page.evaluate("window.overflow") <= 0
