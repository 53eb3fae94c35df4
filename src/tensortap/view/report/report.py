"""Write a run as one HTML file (`tensortap report`): the page and its answers, without a server or a network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final, NamedTuple

from tensortap.errors import MissingExtraError, RunError
from tensortap.store.claim import read_info
from tensortap.store.files import Files
from tensortap.store.names import RUN_JSON
from tensortap.view.api.service import Api, answer_with_retries
from tensortap.view.report.embed import BYTES, Entries, FrozenRun, Progress, embed
from tensortap.view.server.launch import NOT_BUILT, STATIC, built

# The browser itself keeps the promise that nothing is fetched and nothing sent.
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
_SCRIPT: Final = re.compile(r'<script type="module"[^>]*\ssrc="\./([^"]+)"[^>]*></script>')
_STYLE: Final = re.compile(r'<link rel="stylesheet"[^>]*\shref="\./([^"]+)"[^>]*>')


class Report(NamedTuple):
    """What was written."""

    path: str
    bytes: int
    sites: int
    of: int
    every: int


def report(
    path: str, output: str, *, overwrite: bool = False, limit: int = BYTES, static: Path = STATIC,
    progress: Progress = lambda done, total: None,
) -> Report:  # fmt: skip
    """Write one run as one HTML file."""
    if not built(static):
        raise MissingExtraError(NOT_BUILT)
    target = Path(output)
    if target.exists() and not overwrite:
        raise RunError(f"{output} is there already; give --overwrite to replace it, or another name")
    if not (files := Files(path)).exists():
        read_info(files)  # raises, and says what is missing
    if not files.exists(RUN_JSON):
        raise RunError(f"a report must be of one run, got {path!r}: tensortap report runs/exp1 -o report.html")
    api = Api(path, statistics=32)  # a report goes through all of them: it keeps tiles, and no grids of files
    try:
        opened = api.opened("")
        found = answer_with_retries([opened], lambda snapshots: embed(FrozenRun(opened, snapshots[0]), limit, progress))
    finally:
        api.close()
    page = whole_page(static, found.entries)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return Report(output, len(page.encode()), found.sites, found.of, found.every)


def whole_page(static: Path, entries: Entries) -> str:
    """Return the page with its script, its style and the answers inside."""
    page = (static / "index.html").read_text(encoding="utf-8")
    scripts, styles = _SCRIPT.findall(page), _STYLE.findall(page)
    page = _STYLE.sub("", _SCRIPT.sub("", page))
    style = "".join(f"<style>{_inside(static / name, 'style')}</style>" for name in styles)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    data = f'<script type="application/json" id="tensortap-report">{json.dumps(entries)}</script>'
    script = "".join(f'<script type="module">{_inside(static / name, "script")}</script>' for name in scripts)
    head, _, body = page.partition("</head>")
    before, _, after = body.rpartition("</body>")
    return f"{head.replace('<head>', f'<head>{policy}', 1)}{style}</head>{before}{data}{script}</body>{after}"


def _inside(file: Path, tag: str) -> str:
    """Return a file's text, which cannot end the tag it is put into."""
    return re.sub(f"</({tag})", r"<\\/\1", file.read_text(encoding="utf-8"), flags=re.IGNORECASE)


def describe(done: Report) -> str:
    """Return what to tell the user."""
    left = f"; {done.of - done.sites} of {done.of} sites only in the overview" if done.sites < done.of else ""
    thin = f"; sites show one of {done.every} steps, the overview all" if done.every > 1 else ""
    return f"{done.path}: {done.bytes / 1e6:.2g} MB, opens without a server{left}{thin}"
