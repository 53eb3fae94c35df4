"""A real TensorBoard in a real browser shows what we wrote."""

import re
import shutil
import subprocess
import sys
import time
from urllib.request import urlopen

import numpy as np
import pytest

from tensortap.sinks.tensorboard import TensorBoard

pytest.importorskip("tensorboard")
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
BAD = X.copy()
BAD[0, :3] = np.nan

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def loaded(url):
    """Wait until TensorBoard has read the files: a page that comes earlier stays empty."""
    deadline = time.monotonic() + 60
    while "head/output" not in urlopen(f"{url}data/plugin/histograms/tags", timeout=60).read().decode():
        assert time.monotonic() < deadline, "TensorBoard does not read the events"
        time.sleep(0.2)


@pytest.fixture
def address(make_step, tmp_path):
    """TensorBoard over five steps of two sites, one of them with NaN."""
    sink = TensorBoard(tmp_path)
    for number in range(5):
        sink.write(make_step({"blocks.3.mlp": X * (number + 1), "head": BAD}, number=number, metrics={"loss": 1.0}))
    sink.close()
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path), "--port", "0", "--host", "127.0.0.1"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        found = (re.search(r"http://\S+", line) for line in server.stderr)
        url = next(match[0] for match in found if match)
        loaded(url)
        yield url
    finally:
        server.kill()
        server.communicate()


@pytest.mark.thorough  # test_tensorboard.py reads the files back; this starts TensorBoard and a browser
def test_page(address, tmp_path):
    """Modules are groups, each with a histogram that is drawn, the one with NaN too; metrics are beside them."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page(viewport={"width": 1400, "height": 1600})
        page.goto(f"{address}#histograms", timeout=60_000)
        for tag in ("blocks.3.mlp/output", "head/output"):
            page.get_by_text(f"tag: {tag}").wait_for(timeout=60_000)
        shapes = page.locator("vz-histogram-timeseries path.outline, vz-histogram-timeseries .outline")
        shapes.first.wait_for(state="attached", timeout=60_000)
        drawn = shapes.evaluate_all("all => all.map(shape => shape.getAttribute('d') || '')")
        assert len(drawn) == 10
        assert all(path and "NaN" not in path for path in drawn)
        page.goto(f"{address}#scalars", timeout=60_000)
        page.get_by_text("metrics", exact=True).first.wait_for(timeout=60_000)
        page.screenshot(path=str(tmp_path / "tensorboard.png"))
        browser.close()
