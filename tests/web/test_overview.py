"""The first page: the heat map, the metrics above it, the findings beside it."""

from __future__ import annotations

import re

import pytest
import torch

import tensortap as tt

sync_api = pytest.importorskip("playwright.sync_api")
SITES = 18  # outputs of the example's network


def test_hover_reads_the_recorded_value(at, heat, recorded):
    """Under the mouse stands what the run holds, to the digits shown."""
    page = at("#/overview?run=digits")
    said = heat(page).ready(SITES).hover(0, 30.5 / 60)
    assert "stem.0:output" in said and "step 30" in said
    value = tt.open(str(recorded / "digits")).series("stem.0", "std")[1][30]
    assert float(said.rsplit(" ", 1)[1]) == pytest.approx(value, rel=1e-3)


def test_the_first_picture_takes_one_request(at, heat):
    """The heat map is asked for once, at the width that it is shown in, and the server is told of it before."""
    page = at("#/overview?run=digits")
    heat(page).ready(SITES)
    asked = page.evaluate("performance.getEntriesByType('resource').map((entry) => decodeURIComponent(entry.name))")
    (one,) = [name for name in asked if "/api/heat" in name]
    assert int(re.search(r"width=(\d+)", one)[1]) > 400
    assert any("/api/run?ahead=std" in name for name in asked)


@pytest.mark.thorough  # test_hover_reads_the_recorded_value has one of them
def test_every_statistic_can_be_shown(at, heat):
    """The keys [ and ] go through all statistics, and each has a legend of its own."""
    page = at("#/overview?run=digits")
    heat(page).ready(SITES)
    offered = page.get_by_label("Statistic", exact=True).locator("option").count()
    seen = set()
    for _ in range(offered):
        page.keyboard.press("]")
        name = page.get_by_label("Statistic", exact=True).evaluate("(one) => one.selectedOptions[0].textContent")
        sync_api.expect(page.locator(".legend-title")).to_contain_text(name)
        heat(page).ready()
        seen.add(name)
    assert len(seen) == offered >= 10


def test_a_click_opens_the_site_and_escape_comes_back(at, heat):
    """A click on a cell opens its site at that step; Escape goes back to the heat map."""
    page = at("#/overview?run=digits")
    page.mouse.click(*heat(page).ready(SITES).place(4, 0.5))
    sync_api.expect(page.locator("h1")).to_have_text("block.relu:output")
    assert "step=30" in page.url
    page.keyboard.press("Escape")
    heat(page).ready(SITES)


def test_brush_zooms_and_double_click_resets(at, heat):
    """Dragging over steps zooms into them, the address follows, and a double click shows all again."""
    page = at("#/overview?run=digits")
    shown = heat(page).ready(SITES)
    shown.drag(3, 0.25, 0.5)
    page.wait_for_url(re.compile(r"from=15&to=(29|30)"))
    assert "step 15" in shown.hover(0, 0.001)
    page.mouse.dblclick(*shown.place(3, 0.5))
    page.wait_for_url(re.compile(r"^(?!.*from=)"))


def test_an_address_brings_back_the_whole_state(at, heat):
    """Statistic, port, filter, steps and cell are in the address, and opening it shows them."""
    page = at(
        "#/overview?run=digits&stat=zeros&port=grad_output&sites=block.*&from=10&to=19&site=block.relu:grad_output&step=12"
    )
    assert "step 10" in heat(page).ready(3).hover(0, 0.001)
    assert page.get_by_label("Statistic", exact=True).input_value() == "zeros"
    assert page.get_by_label("Port", exact=True).input_value() == "grad_output"
    assert page.get_by_label("Filter sites").input_value() == "block.*"
    sync_api.expect(page.get_by_role("button", name="steps 10–19")).to_be_visible()
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("h1")).to_have_text("block.relu:grad_output")


def test_filter_takes_words_and_patterns(at, heat):
    """A word finds every path with it, a pattern what tt.probe would; one that finds nothing or is none says so."""
    page = at("#/overview?run=digits", expect="400")
    heat(page).ready(SITES)
    page.keyboard.press("/")
    page.keyboard.type("conv")
    heat(page).ready(2)
    page.get_by_label("Filter sites").fill("type:ReLU")
    heat(page).ready(4)
    page.get_by_label("Filter sites").fill("nowhere.at.all")
    sync_api.expect(page.locator(".tools .wrong")).to_contain_text("nowhere.at.all matches nothing")
    page.get_by_label("Filter sites").fill("re:(")
    sync_api.expect(page.locator(".tools .wrong")).to_contain_text("re:(")


def test_keyboard_walks_the_cells(at, heat):
    """Arrows move the cell and say its value, Enter opens it, ? shows the card of keys."""
    page = at("#/overview?run=digits")
    shown = heat(page).ready(SITES)
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    sync_api.expect(shown.element.locator("[aria-live]")).to_contain_text("stem.1:output")
    sync_api.expect(shown.element.locator("[aria-live]")).to_contain_text("step 3:")
    sync_api.expect(page.locator(".metrics .chart-readout").first).to_contain_text("step 3")
    page.keyboard.press("?")
    sync_api.expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("h1")).to_have_text("stem.1:output")


def test_metrics_share_the_crosshair(at, heat):
    """Over a cell the metrics above read the same step; a chip takes a metric away and the address knows."""
    page = at("#/overview?run=digits")
    heat(page).ready(SITES).hover(2, 20.5 / 60)
    readouts = page.locator(".metrics .chart-readout")
    sync_api.expect(readouts).to_have_count(2)
    sync_api.expect(readouts.first).to_contain_text("step 20")
    page.get_by_role("button", name="accuracy").click()
    sync_api.expect(readouts).to_have_count(1)
    assert "metrics=loss" in page.url


def test_findings_stand_beside_it(at, heat):
    """The dead ReLU is named beside the heat map, and leads to its site."""
    page = at("#/overview?run=digits")
    heat(page).ready(SITES)
    page.locator(".finding").get_by_role("link", name="block.relu:output").first.click()
    sync_api.expect(page.locator("h1")).to_have_text("block.relu:output")


def test_table_holds_the_numbers(at, heat):
    """The table under the heat map has a row for each site, and NaN is written there as such."""
    page = at("#/overview?run=digits&stat=zeros")
    heat(page).ready(SITES)
    page.get_by_text("Table: the statistic by site and step").click()
    rows = page.locator(".table[open] tbody tr")
    sync_api.expect(rows).to_have_count(SITES)
    assert rows.filter(has_text="block.relu:output").locator("td").nth(1).inner_text() == "1"


def test_it_fits_the_window(at, heat):
    """Nothing scrolls sideways, the legend is in sight, and the theme is what the system asks for, while it is open."""
    page = at("#/overview?run=digits")
    heat(page).ready(SITES)
    for width, height in ((1280, 800), (2560, 1440)):
        page.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            sync_api.expect(page.locator(".legend")).to_be_in_viewport(ratio=1)
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (scheme == "dark")


def test_training_and_evaluation_are_shown_apart(built, tmp_path, serving, visit, heat):
    """Training is shown first, without gaps where it was evaluated; the phase is chosen above, and links keep it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    with tt.watch(model, to=str(tmp_path / "run")) as tap:
        for step in range(40):
            model.train(step % 5 != 4)
            model(torch.randn(4, 8) * (1 if step % 5 != 4 else 100))
            tap.step(loss=1 / (step + 1))
    with serving(tmp_path / "run") as address:
        page = visit(address, expect="ERR_INCOMPLETE_CHUNKED_ENCODING")  # the server ends first
        heat(page).ready(4)
        sync_api.expect(page.get_by_label("Phase", exact=True)).to_have_value("train")
        sync_api.expect(page.locator(".badge")).to_contain_text("32 steps")
        page.get_by_label("Phase", exact=True).select_option("eval")
        sync_api.expect(page.locator(".badge")).to_contain_text("8 steps")
        assert "steps 4–8" in heat(page).ready(4).hover(0, 0.05)
        page.get_by_role("link", name="Site").click()
        sync_api.expect(page.locator("h1")).to_contain_text("0:output")
        assert "phase=eval" in page.url
