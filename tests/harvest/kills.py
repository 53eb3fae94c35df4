"""Kill a harvest many times at random points, and compare what it comes to with one that was left in peace.

    python tests/harvest/kills.py 200            kills of the driver, at random moments
    python tests/harvest/kills.py 40 --ray       kills of Ray's workers and of the driver

Prints how many kills there were and whether every byte is the same. Exits with 1 where one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harvest.subjects import contents, make_data, make_model

import tensortap as tt

OPTIONS: dict[str, Any] = {
    "keep": tt.tokens(mask="attention_mask"), "batch_size": 4, "dtype": "bf16", "shard_size": 1500, "spread": 2,
    "progress": False,
}  # fmt: skip
SAMPLES = 400


def run(folder: Path, engine: Any = None) -> None:
    torch.set_num_threads(1)
    tt.harvest(make_model, make_data(SAMPLES), "blocks.0", "blocks.2", to=folder, engine=engine, **OPTIONS)


def started(folder: Path, ray: bool) -> int:
    """Begin, or go on with, a harvest in a process of its own; on Ray with all that belongs to it in one group."""
    child = os.fork()
    if not child:
        os.setsid()
        code = 1
        try:
            run(folder, tt.Ray(workers=2) if ray else None)
            code = 0
        finally:
            os._exit(code)
    return child


def workers_of(driver: int) -> list[int]:
    """The workers of Ray that do parts for a driver."""
    listed = subprocess.run(["ps", "-eo", "pid,sess,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [int(pid) for pid, _, words in rows if "ray::MapWorker" in words]


def kill_until_done(folder: Path, kills: int, ray: bool, chance: random.Random) -> int:
    """Kill at random moments until the harvest is complete, or enough were killed; then let it end."""
    done = 0
    while done < kills:
        child = started(folder, ray)
        until = time.monotonic() + chance.uniform(0.0, 25.0 if ray else 1.5)
        while time.monotonic() < until:
            if os.waitpid(child, os.WNOHANG)[0]:
                return done
            time.sleep(0.002)
        workers = workers_of(child) if ray else []
        if workers and chance.random() < 0.7:
            os.kill(chance.choice(workers), signal.SIGKILL)  # Ray does the part again
            if os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 0:
                return done + 1
        else:
            with contextlib.suppress(ProcessLookupError):  # it has not begun a group of its own yet
                os.killpg(child, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        done += 1
    return done


def main() -> int:
    """Kill, compare, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    base = Path(tempfile.mkdtemp())
    child = started(base / "whole", False)
    os.waitpid(child, 0)
    want = contents(base / "whole")
    rows = sum(len(sample["input_ids"]) for sample in make_data(SAMPLES)) * 2
    killed = harvests = wrong = 0
    while killed < options.kills:
        folder = base / f"acts-{harvests}"
        killed += kill_until_done(folder, options.kills - killed, options.ray, chance)
        os.waitpid(started(folder, options.ray), 0)
        acts = tt.open_harvest(folder)
        same = contents(folder) == want
        wrong += not same or acts.rows != rows or not acts.complete
        harvests += 1
        print(f"{killed} kills, {harvests} harvests, {acts.rows} of {rows} rows, bytes {'same' if same else 'DIFFER'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
