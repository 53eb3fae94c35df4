"""Draws docs/viewer.png: `tensortap view` over a training whose learning rate jumps a millionfold; NaN follows.

`make picture` runs it. It needs chromium and the built page.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
SIZE = {"width": 1600, "height": 860}
FINDINGS = "() => document.querySelector('.finding') && +document.querySelector('.heat')?.dataset.drawn > 0"


def picture(address: str, to: Path) -> None:
    """The overview, with the mouse over a cell."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport=SIZE, color_scheme="light")
        page.goto(f"{address}#/overview?run=encoder")
        page.wait_for_function(FINDINGS)
        box = page.locator(".heat-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.62, box["y"] + box["height"] * 0.25)
        page.screenshot(path=to)
        chromium.close()


def main() -> None:
    """Train, serve, look."""
    record = runpy.run_path(str(HERE.parent / "tests" / "web" / "record.py"))
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        record["jump"](runs / "encoder", steps=240, at=158)
        words = [sys.executable, "-u", "-m", "tensortap", "view", str(runs), "--no-open"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
            try:
                lines = iter(server.stdout.readline, "")
                address = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
                picture(address, HERE / "viewer.png")
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
