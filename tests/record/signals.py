"""Send a thousand signals to processes that close steps: none waits for ever, and no step is lost.

    python tests/record/signals.py 1000      # `make signals`

In turn: SIGUSR1 whose handler calls the model and `tap.step()`, as preemption handlers do, a hundred to each process;
and SIGTERM whose handler calls `tap.close()`, one to each process, at a random moment. Processes are forked from one
that has imported everything. Exits with 1 when one of them does not end in time, or lost a row that is not counted.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import tensortap as tt

SECONDS = 60
AT_ONCE = 100
TURNS = 11  # a process that is sent many, and ten that are only closed


def stepping(path: str) -> None:
    """Close steps in a loop and in the handler of SIGUSR1, until SIGTERM closes the tap; every row is accounted for."""
    model, x, calls, inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4), 0, 0
    tap = tt.watch(model, "*", to=path)

    def step() -> None:
        nonlocal calls, inside
        inside += 1
        with torch.no_grad():
            model(x)
        calls += 1
        tap.step(loss=1.0)
        inside -= 1

    def end(*_: object) -> None:
        tap.close()
        rows = tt.open(path).table(columns=["step"]).num_rows
        missing = 2 * calls - rows - tap.counts.get("late_records", 0)
        os._exit(0 if missing <= 2 * inside else 3)  # handlers interrupt each other: those steps are not closed yet

    step()
    signal.signal(signal.SIGUSR1, lambda *_: step())
    signal.signal(signal.SIGTERM, end)
    Path(f"{path}.ready").touch()
    while True:
        step()


def forked(path: str) -> int:
    """Start a process that closes steps."""
    pid = os.fork()
    if not pid:
        try:
            stepping(path)
        finally:
            os._exit(4)
    while not Path(f"{path}.ready").exists():
        time.sleep(0.001)
    return pid


def ended(pid: int) -> int | None:
    """Return the exit code of a process; None when it does not end in time, and then it is killed."""
    for _ in range(SECONDS * 100):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main(count: int) -> int:
    """Send as many signals; print what went wrong."""
    rng, sent, wrong = random.Random(0), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count():
            if sent >= count:
                break
            handled = min(AT_ONCE, count - sent - 1) if number % TURNS == 0 else 0
            pid = forked(f"{folder}/{sent}")
            for _ in range(handled):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(rng.random() * 0.002)
            time.sleep(rng.random() * 0.01)
            os.kill(pid, signal.SIGTERM)
            sent += handled + 1
            if code := (found if (found := ended(pid)) is not None else -1):
                wrong += 1
                print(f"after {sent} signals: {'a deadlock' if code == -1 else f'exit code {code}'}", flush=True)
    print(f"{sent} signals, {wrong} processes went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
