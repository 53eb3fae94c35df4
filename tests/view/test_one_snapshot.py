"""What the terminal, a notebook and an agent are told of a run is of one moment, however the run grows meanwhile."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, Group

import tensortap as tt
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot, Snapshots
from tensortap.view.agent.questions import Questions
from tensortap.view.agent.story import story
from tensortap.view.notebook.run import run_html
from tensortap.view.terminal.findings import check_run, draw_findings
from tensortap.view.terminal.live import frame
from tensortap.view.terminal.show import draw, read_view


@pytest.fixture
def tap(tmp_path: Path) -> Iterator[tt.Tap]:
    """A tap that is still open, with three steps."""
    with tt.watch(to=tmp_path / "run") as opened:
        for _ in range(3):
            grow(opened, "x")
        yield opened


def grow(tap: tt.Tap, *sites: str) -> None:
    for site in sites:
        tt.tap(np.arange(4.0), site)
    tap.step(loss=1.0)


def shown(run: Run, sites: list[str] | None = None) -> str:
    stream = io.StringIO()
    draw(read_view(run, sites), stream)
    return stream.getvalue()


def live(run: Run) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(Group(*frame(run, None, "worst", (100, 30))))
    return stream.getvalue()


def checked(run: Run) -> str:
    stream = io.StringIO()
    draw_findings(check_run(run), stream=stream)
    return stream.getvalue()


READERS: dict[str, Callable[[Run], object]] = {
    "show": shown,
    "show a site": lambda run: shown(run, ["x"]),
    "show as JSON": lambda run: read_view(run).as_json(),
    "live": live,
    "notebook": run_html,
    "story": story,
    "check": checked,
    "check as JSON": lambda run: check_run(run).as_json(failed=False),
}


@pytest.mark.parametrize("name", READERS)
def test_one_answer_takes_one_snapshot(name: str, tap: tt.Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that grows after each snapshot is shown as it was at the first, and no other is taken."""
    run, read, take = tt.open_run(str(tap.path)), READERS[name], Snapshots.take
    known = read(run)
    taken: list[Snapshot] = []

    def growing(self: Snapshots, max_age: float = 0.0, *, whole: bool = False) -> Snapshot:
        taken.append(take(self, max_age, whole=whole))
        grow(tap, "x", f"later{len(taken)}")
        return taken[-1]

    monkeypatch.setattr(Snapshots, "take", growing)
    assert read(run) == known and len(taken) == 1
    monkeypatch.undo()
    assert read(run) != known or name == "check as JSON"  # it names neither steps nor sites


@pytest.mark.parametrize("question", ["runs", "summary", "explain", "histogram", "site"])
def test_a_question_takes_one_snapshot(question: str, tap: tt.Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does every answer that an agent gets."""
    questions, take = Questions(str(tap.path)), Snapshots.take
    given = {"site": "x"} if question in ("histogram", "site") else {}
    known = getattr(questions, question)(**given)
    taken: list[Snapshot] = []

    def growing(self: Snapshots, max_age: float = 0.0, *, whole: bool = False) -> Snapshot:
        taken.append(take(self, max_age, whole=whole))
        grow(tap, "x")
        return taken[-1]

    monkeypatch.setattr(Snapshots, "take", growing)
    assert getattr(questions, question)(**given) == known and len(taken) == 1
