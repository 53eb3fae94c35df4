"""One site closely, and the tensors that were kept of it."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tt

sync_api = pytest.importorskip("playwright.sync_api")


def test_activation_and_gradient_stand_side_by_side(at):
    """Quantiles, histogram and statistics of an output, its gradient's beside them, and the record with its reason."""
    page = at("#/site?run=digits&site=head.1:output")
    panels = page.locator(".grid > .panel > h2")
    sync_api.expect(panels.first).to_have_text("head.1:output")
    sync_api.expect(panels.nth(1)).to_have_text("head.1:grad_output")
    for title in (
        "Quantiles",
        "Histogram over steps",
        "Mean within min and max",
        "Standard deviation",
        "L2 norm",
        "Zeros, share",
    ):
        sync_api.expect(page.locator(".chart-title", has_text=title)).to_have_count(2)
    sync_api.expect(page.get_by_text("kept because")).to_be_visible()
    sync_api.expect(page.get_by_role("link", name="weight:grad")).to_be_visible()


def test_table_agrees_with_the_run(at, recorded):
    """The table behind the charts has the run's own numbers, a row a step."""
    page = at("#/site?run=digits&site=head.1:output")
    page.locator(".grid > .panel").first.get_by_text("Table: statistics").click()
    rows = page.locator(".table[open] tbody tr")
    sync_api.expect(rows).to_have_count(60)
    shown = [float(row.locator("td").nth(2).inner_text().replace("−", "-")) for row in (rows.nth(0), rows.nth(59))]
    steps, values = tt.open(str(recorded / "digits")).series("head.1", "std")
    assert list(steps)[-1] == 59
    assert shown == pytest.approx([values[0], values[-1]], rel=1e-4)


@pytest.mark.thorough  # test_table_agrees_with_the_run
def test_histogram_has_a_table_too(at):
    """The table behind the histogram holds shares that add up to one, step by step."""
    page = at("#/site?run=digits&site=head.1:output")
    page.locator(".grid > .panel").first.get_by_text("Table: histogram").click()
    shares = page.locator(".table[open] tbody tr td:nth-child(3)")
    sync_api.expect(shares.first).to_be_visible()
    values = [float(text.replace("−", "-")) for text in shares.all_inner_texts()]
    assert sum(values) == pytest.approx(1, abs=1e-3)


def test_zoom_is_shared_by_all_charts_and_in_the_address(at):
    """A brush over one chart asks for those steps of both sites; the button shows all again."""
    page = at("#/site?run=digits&site=head.1:output")
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="steps 15–").click()
    sync_api.expect(page.get_by_role("button", name="steps 15–")).to_have_count(0)
    assert "from=" not in page.url


def test_calls_can_be_told_apart(at):
    """A module called twice a step offers its calls, and the address holds the choice."""
    page = at("#/site?run=attention&site=shared:output")
    page.get_by_label("call", exact=True).select_option("1")
    page.wait_for_url("**call=1**")
    sync_api.expect(page.get_by_label("call", exact=True)).to_have_value("1")


def test_feature_maps_are_a_grid_and_each_can_be_read(at, recorded):
    """Sixteen channels side by side; one of them, opened, reads the stored value under the mouse."""
    page = at("#/site?run=digits&site=stem.0:output&tensor=40,0,full,0,2")
    maps = page.locator(".maps canvas")
    sync_api.expect(maps).to_have_count(16)
    maps.nth(5).click()
    page.wait_for_url("**index=0%2C5**")
    image = page.locator(".tensor canvas").first
    sync_api.expect(page.get_by_label("Index of axis 1")).to_have_value("5")
    box = image.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 8, box["y"] + box["height"] * 6.5 / 8)
    value = tt.open(str(recorded / "digits")).tensor("stem.0", 40)[0, 5, 6, 2]
    said = page.locator(".tensor [aria-live]").inner_text()
    assert "row 6, column 2" in said
    assert float(said.split()[-1].replace("−", "-")) == pytest.approx(value, rel=1e-3)


@pytest.mark.thorough  # test_feature_maps_are_a_grid_and_each_can_be_read
def test_attention_is_a_map_a_head(at):
    """Weights of four heads are four maps."""
    page = at("#/site?run=attention&site=attention:output")
    sync_api.expect(page.locator(".maps canvas")).to_have_count(4)


def test_a_large_matrix_is_shrunk_and_a_rectangle_is_read_whole(at):
    """900 × 700 elements are shown with their extremes; a dragged rectangle is asked for anew, element by element."""
    page = at("#/site?run=attention&site=matrix:output")
    sync_api.expect(page.get_by_text("the extreme one shown")).to_be_visible()
    image = page.locator(".tensor canvas").first
    image.scroll_into_view_if_needed()
    box = image.bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 60, steps=3)
    page.mouse.up()
    sync_api.expect(page.get_by_text("the extreme one shown")).to_have_count(0)
    box = image.bounding_box()
    page.mouse.move(box["x"] + 205, box["y"] + 305)
    sync_api.expect(page.locator(".tensor [aria-live]")).to_contain_text("row")
    said = page.locator(".tensor [aria-live]").inner_text()
    row, column = (int(part) for part in (said.split()[1].rstrip(","), said.split()[3].rstrip(":")))
    assert float(said.split()[-1].replace("−", "-")) == pytest.approx(np.sin(row * column / 20_000), abs=1e-3)


@pytest.mark.thorough  # tables have a test above
def test_samples_are_values_in_a_table(at):
    """Sampled values are a strip, with each value in the table."""
    page = at("#/site?run=digits&site=head.1:output")
    sync_api.expect(page.get_by_label("Kept tensor")).to_contain_text("sample [64]")
    page.locator(".tensor .table summary").click()
    sync_api.expect(page.locator(".tensor tbody tr")).to_have_count(64)


def test_an_unknown_site_says_where_to_look(at):
    """A site that is not in the run is named, with a way to all of them."""
    page = at("#/site?run=digits&site=nope:output")
    sync_api.expect(page.get_by_text("nope:output is not in this run")).to_be_visible()
    page.get_by_role("link", name="See all sites").click()
    sync_api.expect(page.locator(".heat")).to_be_visible()


def test_histograms_that_were_left_out_are_spoken_of(at):
    """Of a very long run only some histograms are read, and the page says so; of a short one it says nothing."""
    page = at("#/site?run=long&site=fc:output")
    sync_api.expect(page.locator(".quiet", has_text="Histogram and quantiles are of one of 2 steps.")).to_be_visible()
    page = at("#/site?run=digits&site=stem.0:output")
    sync_api.expect(page.locator(".chart-title", has_text="Quantiles").first).to_be_visible()
    sync_api.expect(page.locator(".quiet", has_text="one of")).to_have_count(0)
