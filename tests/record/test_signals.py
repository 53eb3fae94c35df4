"""Signal handlers, threads and asyncio tasks that close steps while steps are being closed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.record import serial

SECONDS = 120  # a deadlock is a failure, not a hang


def run(tmp_path: Path, script: str, *, status: int = 0) -> str:
    """What a script prints that ends as expected, and in time."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
    assert done.returncode == status, done.stderr[-2000:]
    return done.stdout


def test_handlers_that_close_steps_neither_deadlock_nor_lose_rows(tmp_path: Path) -> None:
    """A thousand signals, each of which calls the model and closes a step, leave every row written or counted."""
    out = run(
        tmp_path,
        """
        import signal, torch, tensortap as tt
        torch.set_num_threads(1)
        model, x, calls, signals = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4), 0, 0

        def step():
            global calls
            calls += 1
            with torch.no_grad():
                model(x)
            tap.step(loss=1.0)

        def handler(number, frame):
            global signals
            signals += 1
            step()
            if signals < 1000:
                signal.setitimer(signal.ITIMER_REAL, 2e-4)

        with tt.watch(model, "*", to="run") as tap:
            step()
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 2e-4)
            while signals < 1000:
                step()
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        run = tt.open("run")
        print(2 * calls - run.table(columns=["step"]).num_rows - tap.counts.get("late_records", 0), signals)
        print(sorted(set(tap.counts) - {"late_records"}))
        """,
    )
    assert out.split("\n")[:2] == ["0 1000", "[]"]


@pytest.mark.parametrize("after", ["", "sys.exit(0)"])
def test_a_tap_closed_by_a_handler_writes_everything(tmp_path: Path, after: str) -> None:
    """`tap.close()` in a SIGTERM handler waits for the step that is being closed, also where the handler exits."""
    out = run(
        tmp_path,
        f"""
        import os, signal, sys, numpy as np, tensortap as tt
        made = 0

        def handler(number, frame):
            tap.close()
            print(made, flush=True)
            {after or "pass"}

        tap = tt.watch(to="run")
        signal.signal(signal.SIGTERM, handler)
        for step in range(400):
            tt.tap(np.ones(8), "x")
            made += not tap.closed
            if step == 300:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, handler)
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
            tap.step()
        """,
    )
    opened = tt.open_run(tmp_path / "run")
    assert abs(opened.table(columns=["step"]).num_rows - int(out.split()[0])) <= 1  # it may hit between two lines
    assert opened.state == "finished"


def test_a_default_sigterm_waits_for_the_step_being_closed(tmp_path: Path) -> None:
    """Without a handler of the user's, SIGTERM writes what is there and ends the process by the signal."""
    run(
        tmp_path,
        """
        import os, signal, threading, numpy as np, tensortap as tt
        tap = tt.watch(to="run")
        step = 0
        while True:
            tt.tap(np.ones(8), "x")
            if step == 200:
                threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGTERM)).start()
            tap.step()
            step += 1
        """,
        status=-15,
    )
    opened = tt.open_run(tmp_path / "run")
    assert opened.state == "finished" and opened.table(columns=["step"]).num_rows >= 200


def test_calls_inside_a_call_are_made_after_it() -> None:
    """Also when the outer call fails, and in the order in which they came."""
    seen: list[str] = []

    def outer() -> None:
        serial.run(lambda: seen.append("first"))
        serial.run(lambda: seen.append("second"))
        seen.append("outer")
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        serial.run(outer)
    serial.run(lambda: seen.append("later"))
    assert seen == ["outer", "first", "second", "later"]


def test_threads_that_close_each_others_steps_count_what_is_refused(tmp_path: Path) -> None:
    """Of the rows and metrics that eight threads give while all call `tap.step()`, each is written or counted."""
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 120
    with tt.watch(model, "*", to=tmp_path / "run") as tap:

        def work() -> None:
            for _ in range(calls):
                with torch.no_grad():
                    model(torch.ones(2, 4))
                tap.step(loss=1.0)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    rows = tap.run.table(columns=["step"]).num_rows
    assert rows + tap.counts.get("late_records", 0) == 8 * calls * 2
    assert tap.run.metrics().num_rows + tap.counts.get("late_metrics", 0) == 8 * calls


def test_spans_of_tasks_keep_their_rows_apart(tmp_path: Path) -> None:
    """Tasks of one thread that wait inside their spans have a step each, with their own label and all their rows."""
    model, tasks, calls = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 40, 3
    with tt.watch(model, "*", to=tmp_path / "run") as tap:

        async def serve(number: int) -> None:
            with tap.span(request=number):
                for _ in range(calls):
                    with torch.no_grad():
                        model(torch.full((1, 4), float(number)))
                    await asyncio.sleep(0)

        async def main() -> None:
            await asyncio.gather(*(serve(number) for number in range(tasks)))

        asyncio.run(main())
    labels = {row["step"]: row["text"] for row in tap.run.metrics().to_pylist()}
    rows = [row["step"] for row in tap.run.table(columns=["step"]).to_pylist()]
    assert sorted(labels.values()) == sorted(str(number) for number in range(tasks))
    assert all(rows.count(step) == 2 * calls for step in labels) and len(rows) == 2 * calls * tasks
    assert tap.counts == {}
