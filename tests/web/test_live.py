"""A run that is being written while the page looks at it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")

# One line in, one step recorded and answered: the test decides when there is more to see.
PROGRAM = """
import sys
import numpy as np
import tensortap as tt

with tt.watch(tt.probe("**", keep=[tt.stats(), tt.histogram()]), to=sys.argv[1]) as tap:
    print("open", flush=True)
    for step, line in enumerate(sys.stdin):
        if line == "end\\n":
            break
        for i in range(3):
            tt.tap(np.arange(9.0) * step + i, f"layers.{i}")
        tap.step(loss=1 / (step + 1))
        print(step, flush=True)
print("closed", flush=True)
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """A process that records a step for each word it is given."""
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "runs" / "now")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "open\n"

        def tell(word: str) -> None:
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
            assert process.stdout.readline()

        yield tell
        process.stdin.close()
        process.wait()


def test_new_steps_appear_without_reload(
    training: Callable[[str], None], built: Path, tmp_path: Path, serving: Any, visit: Any, heat: Any
):
    """An empty page waits, shows the first step when it comes, follows on every page, and says when it is over."""
    with serving(tmp_path / "runs") as address:
        page = visit(address, expect="ERR_")
        sync_api.expect(page.get_by_text("Waiting for the first step")).to_be_visible()
        page.evaluate("window.kept = true")
        training("step")
        shown = heat(page).ready(3)
        training("step")
        training("step")
        sync_api.expect(page.locator(".badge")).to_have_text("live, 3 steps")
        page.wait_for_function("() => document.querySelector('.metrics .chart-readout b')?.textContent === '0.333'")
        assert "step 2" in shown.hover(1, 0.99)
        page.keyboard.press("3")
        sync_api.expect(page.locator("output")).to_have_text("step 2")
        training("step")
        sync_api.expect(page.locator("output")).to_have_text("step 3")
        page.keyboard.press("2")
        page.locator(".grid > .panel").first.get_by_text("Table: statistics").click()
        training("step")
        sync_api.expect(page.locator(".table[open] tbody tr")).to_have_count(5)
        training("end")
        sync_api.expect(page.locator(".badge")).to_have_text("finished, 5 steps")
        assert page.evaluate("window.kept")


def test_a_server_that_is_gone_is_said(built: Path, recorded: Path, serving: Any, visit: Any):
    """When the server ends the page says so, and goes on showing what it has."""
    with serving(recorded) as address:
        page = visit(f"{address}#/overview?run=crashed", expect="ERR_")
        sync_api.expect(page.locator(".badge")).to_have_text("crashed, 12 steps")
    sync_api.expect(page.locator(".badge")).to_have_text("server gone")
    sync_api.expect(page.locator(".heat")).to_be_visible()
