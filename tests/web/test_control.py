"""The panel of `tensortap view --control`: what `tensortap ctl` does, as buttons."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tensortap as tt

sync_api = pytest.importorskip("playwright.sync_api")


@pytest.fixture
def live(tmp_path):
    """A tap that is stepped on a thread until the test is over."""
    over = threading.Event()

    def train(tap):
        while not over.wait(0.02):
            tt.tap(np.ones(3), "x")
            tt.tap(np.ones(3), "y")
            tap.step()

    with tt.watch("x", to=tmp_path / "run") as tap:
        thread = threading.Thread(target=train, args=(tap,))
        thread.start()
        yield tap
        over.set()
        thread.join()


def test_buttons_do_what_ctl_does(built, live, serving, visit, violations, tmp_path):
    """Capture, probe, note, pause and resume act on the training that runs; the panel lists its probes."""
    with serving(tmp_path / "run", control=True) as address:
        page = visit(address, expect="ERR_")
        panel = page.locator(".control")
        panel.locator("summary").click()
        sync_api.expect(panel.locator("li")).to_have_count(1)
        panel.get_by_label("Sites").fill("y")
        panel.get_by_role("button", name="Capture").click()
        sync_api.expect(panel.get_by_role("status")).to_contain_text("keeps full of")
        panel.get_by_role("button", name="Add as probe").click()
        sync_api.expect(panel.get_by_role("status")).to_contain_text("probe ")
        sync_api.expect(panel.locator("li", has_text="y").first).to_be_visible()
        panel.locator("li", has_text="y").last.get_by_role("button").click()
        sync_api.expect(panel.get_by_role("status")).to_contain_text("was removed: y")
        panel.get_by_label("Note").fill("halved the rate")
        panel.get_by_role("button", name="Add", exact=True).click()
        sync_api.expect(panel.get_by_role("status")).to_contain_text("note")
        panel.get_by_role("button", name="Pause").click()
        sync_api.expect(panel.get_by_role("status")).to_contain_text("paused")
        panel.get_by_role("button", name="Resume").click()
        sync_api.expect(panel.get_by_role("status")).to_contain_text("record")
        assert violations(page) == []
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    asked = [event["name"] for event in live.run.events().to_pylist()]
    assert asked == ["capture", "capture ended", "probe add", "probe remove", "note", "pause", "resume"]
    assert "y:output" in live.run.sites and next(live.run.tensors("y"))[0].kind == "full"
