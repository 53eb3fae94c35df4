"""The page of a harvest: its sites, a site's histogram and spectrum, and what activates a dimension."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import tensortap as tt

sync_api = pytest.importorskip("playwright.sync_api")
torch = pytest.importorskip("torch")


def test_a_harvest_can_be_looked_at(built, visit, serving, violations, tmp_path: Path):
    """The address of a harvest shows it at once; a dead dimension is listed, and clicking it shows its samples."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Embedding(50, 24), torch.nn.Linear(24, 24))
    with torch.no_grad():
        layer[1].weight[5] = 0.0
    data = [np.arange(i, i + 8) % 50 for i in range(60)]
    tt.harvest(layer, data, "0", "1", to=tmp_path / "acts", batch_size=20, progress=False)
    with serving(tmp_path / "acts") as address:
        page = visit(address)
        sync_api.expect(page.locator("h1")).to_have_text("acts")
        sync_api.expect(page.locator("table tbody tr").first).to_contain_text("0:output")
        page.get_by_label("Site", exact=True).select_option("1:output")
        page.wait_for_url(re.compile("site=1:output"))
        sync_api.expect(page.locator(".chips").first).to_contain_text("1 dimension dead")
        page.locator(".chips a", has_text="5").first.click()
        sync_api.expect(page.get_by_role("heading", name="What activates dimension 5 most")).to_be_visible()
        sync_api.expect(page.locator("section.panel table").last.locator("tbody tr")).to_have_count(20)
        sync_api.expect(page.locator(".harvest-bars i")).to_have_count(96)
        assert violations(page) == []
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_function("() => document.documentElement.scrollWidth <= 390")
