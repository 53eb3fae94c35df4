"""A server over recorded runs and a headless chromium, once for all tests; errors on the console fail the test.

Of a test that fails there is a picture of each of its pages in tests/web/artefacts; with TENSORTAP_PICTURES=1 of all.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import served as serving_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STATIC = ROOT / "src" / "tensortap" / "view" / "static"
ARTEFACTS = HERE / "artefacts"
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
PICTURES = bool(os.environ.get("TENSORTAP_PICTURES"))
FAILED = pytest.StashKey[bool]()
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--process-per-site",
]


@pytest.fixture(scope="session")
def built() -> Path:
    """The page, built from the sources as they are."""
    index = STATIC / "index.html"
    sources = [path for path in (ROOT / "web").glob("src/*") if path.is_file()]
    if index.exists() and index.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
        return STATIC
    if not shutil.which("npm"):
        pytest.skip("the page is not built from these sources, and there is no Node to build it with")
    if not (ROOT / "web" / "node_modules").exists():
        subprocess.run(["npm", "ci"], cwd=ROOT / "web", check=True, capture_output=True)
    done = subprocess.run(["npm", "run", "build"], cwd=ROOT / "web", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return STATIC


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that record.py makes."""
    folder = tmp_path_factory.mktemp("web") / "runs"
    runpy.run_path(str(HERE / "record.py"))["record"](folder)
    return folder


@pytest.fixture
def serving() -> Callable[..., AbstractContextManager[str]]:
    """A function that serves another folder, from this process; its address."""

    @contextmanager
    def serve_here(folder: Path, **more: Any) -> Iterator[str]:
        with serving_folder(folder, **more) as started:
            yield started.address

    return serve_here


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """`tensortap view`, as a user starts it; its address."""
    words = [sys.executable, "-u", "-m", "tensortap", "view", str(folder), "--no-open", "--port", "6400"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    ) as server:
        try:
            assert server.stdout is not None
            said = ""
            while not (found := re.search(r"http://\S+", said)):
                line = server.stdout.readline()
                assert line, f"the server ended: {said}"
                said += line
            yield found[0]
        finally:
            server.terminate()


@pytest.fixture(scope="session")
def served(built: Path, recorded: Path) -> Iterator[str]:
    """The address of the runs."""
    with serve(recorded) as address:
        yield address


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Headless chromium, the one that is installed; it ends with these tests: its event loop runs on meanwhile."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


class PagePool:
    """Pages that tests use one after the other: to open a new one takes the browser longer than most tests take."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._idle: list[Any] = []

    def take(self, new: bool) -> Any:
        """Return a page that shows nothing; a new one has an empty cache too."""
        return self._idle.pop() if self._idle and not new else self._browser.new_page()

    def give_back(self, page: Any) -> None:
        """Leave nothing of a test on its page: neither what it stored nor where the mouse is."""
        page.mouse.move(0, 0)
        page.evaluate("localStorage.clear()")
        page.goto("about:blank")
        self._idle.append(page)


@pytest.fixture(scope="package")
def page_pool(browser: Any) -> PagePool:
    """The pages of all tests."""
    return PagePool(browser)


@pytest.fixture
def visit(page_pool: PagePool, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """A function that opens an address in a page of its own; what the console complains of fails the test."""
    pages, wrong = [], []

    def go(
        address: str, *, size: tuple[int, int] = (1280, 800), dark: bool = False, expect: str = "", new: bool = False
    ) -> Any:
        page = page_pool.take(new)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme="dark" if dark else "light")
        heard = lambda text: None if expect and expect in text else wrong.append(text)  # noqa: E731
        listeners = {
            "console": lambda message: heard(message.text) if message.type in ("error", "warning") else None,
            "pageerror": lambda error: heard(str(error)),
        }
        for event, listener in listeners.items():
            page.on(event, listener)
        page.set_default_timeout(15_000)
        page.goto(address)
        pages.append((page, listeners, new or bool(expect)))
        return page

    yield go
    name = re.sub(r"[^\w-]+", "-", request.node.name)
    failed = request.node.stash.get(FAILED, False)
    for i, (page, listeners, used_up) in enumerate(pages):
        if PICTURES or wrong or failed:
            _draw(page, f"{name}{f'-{i}' if i else ''}")
        if used_up or wrong or failed:  # its server is gone, or it is not what others expect
            page.close()
            continue
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        page_pool.give_back(page)
    assert not wrong, wrong


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note that a test has failed, for its pictures."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def _draw(page: Any, name: str) -> None:
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"{name}.png")


@pytest.fixture
def picture() -> Callable[[Any, str], None]:
    """A function that waits until a page has been drawn at its size, and keeps a picture of it if they are wanted."""

    def keep(page: Any, name: str) -> None:
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        if PICTURES:
            _draw(page, name)

    return keep


@pytest.fixture(scope="session")
def violations(built: Path) -> Callable[[Any], list[Any]]:
    """A function that returns what axe-core complains of on a page."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: cd web && npm ci")
    source = AXE.read_text(encoding="utf-8")

    def complaints(page: Any) -> list[Any]:
        if not page.evaluate("'axe' in window"):
            page.evaluate(source)
        found: list[Any] = page.evaluate(
            "axe.run().then((said) => said.violations.map((one) => [one.id, one.nodes[0].html]))"
        )
        return found

    return complaints


@pytest.fixture
def at(visit: Callable[..., Any], served: str) -> Callable[..., Any]:
    """A function that opens a page of a recorded run by its hash."""
    return lambda hash, **more: visit(served + hash, **more)


class Heat:
    """A heat map on a page: where its cells are, and what colour."""

    def __init__(self, page: Any, selector: str = ".heat") -> None:
        self.page = page
        self.element = page.locator(selector).first
        self.canvas = self.element.locator(".heat-over")

    def ready(self, rows: int | None = None) -> Heat:
        """Wait until cells are drawn; with a number, until there are so many rows."""
        wanted = "true" if rows is None else f"+heat.dataset.rows === {rows}"
        heat = "const heat = document.querySelector('.heat');"
        self.page.wait_for_function(f"() => {{ {heat} return heat && +heat.dataset.drawn > 0 && {wanted} }}")
        return self

    def place(self, row: int, share: float) -> tuple[float, float]:
        """Where a row and a share of the steps in sight lie on the page."""
        box, gutter = self.canvas.bounding_box(), float(self.element.get_attribute("data-gutter"))
        height = float(self.element.get_attribute("data-row"))
        return box["x"] + gutter + share * (box["width"] - gutter), box["y"] + (row + 0.5) * height

    def hover(self, row: int, share: float) -> str:
        """What the tip says of a cell; a page that is still being laid out may move it away from the mouse."""
        tip, errors = self.element.locator(".tip"), pytest.importorskip("playwright.sync_api")
        for _ in range(20):
            self.page.mouse.move(*self.place(row, share))
            try:
                tip.wait_for(timeout=1000)
            except errors.TimeoutError:
                continue
            return tip.inner_text()
        raise AssertionError(f"no tip appears over row {row} at {share}")

    def wait_for_colour(self, cells: list[tuple[int, float]], colour: tuple[int, ...]) -> None:
        """Wait until cells have a colour: a map is drawn again when its room or its data changes."""
        for _ in range(50):
            if (seen := {self.colour(*cell) for cell in cells}) == {colour}:
                return
            self.page.wait_for_timeout(100)
        assert seen == {colour}

    def drag(self, row: int, start: float, end: float) -> None:
        """Brush over steps."""
        self.page.mouse.move(*self.place(row, start))
        self.page.mouse.down()
        self.page.mouse.move(*self.place(row, (start + end) / 2))
        self.page.mouse.move(*self.place(row, end))
        self.page.mouse.up()

    def colour(self, row: int, share: float) -> tuple[int, ...]:
        """The colour of a cell, as drawn."""
        x, y = self.place(row, share)
        box = self.canvas.bounding_box()
        script = """async (base, [x, y]) => {
            for (let frame = 0; frame < 2; frame++) { // what is being fitted to its room is empty for one
                await new Promise(requestAnimationFrame);
            }
            const copy = new OffscreenCanvas(base.width, base.height).getContext("2d", { willReadFrequently: true });
            copy.drawImage(base, 0, 0);
            return [...copy.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data];
        }"""
        return tuple(self.element.locator(".heat-base").evaluate(script, [x - box["x"], y - box["y"]]))


@pytest.fixture
def heat() -> type[Heat]:
    """The heat map of a page: `heat(page).ready()`."""
    return Heat
