"""Kill harvests many times at random points, and compare what they come to with one that was left in peace.

    python tests/harvest/kills.py 200                  of every engine a share: local, torchrun, Ray
    python tests/harvest/kills.py 40 --engine ray      of one

`local` kills the process. `torchrun` kills one of its two workers, which it starts again, or everything. `ray` kills
one of the two workers of a running cluster, or the driver. Prints how many kills there were, and whether every row is
there once and every byte is the same. Exits with 1 where one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harvest.subjects import Model, contents, make_data, make_model

import tensortap as tt

OPTIONS: dict[str, Any] = {
    "keep": tt.tokens(mask="attention_mask"), "batch_size": 4, "dtype": "bf16", "shard_size": 1500, "spread": 2,
    "progress": False,
}  # fmt: skip
SAMPLES = 400
SITES = ("blocks.0", "blocks.2")
SHARES = {"local": 0.5, "torchrun": 0.25, "ray": 0.25}
MARK = "TENSORTAP_KILLS"
PAUSE = 0.01  # seconds that a forward pass takes at least, so that kills fall into the middle of parts


def make_slow_model() -> Model:
    """The model, whose forward pass takes a while."""
    model = make_model()
    model.register_forward_pre_hook(lambda module, args: time.sleep(PAUSE))
    return model


def run(folder: Path, engine: str) -> None:
    """Harvest, or go on with it."""
    torch.set_num_threads(1)
    chosen: Any = {"local": "local", "torchrun": "torchrun", "ray": tt.Ray(workers=2)}[engine]
    if engine == "ray":
        connect()
    tt.harvest(make_slow_model, make_data(SAMPLES), *SITES, to=folder, engine=chosen, **OPTIONS)


def connect() -> None:
    """Use the cluster of this campaign, whose workers carry its mark."""
    import ray

    tests = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: os.environ[MARK]}
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR",
             runtime_env={"env_vars": variables})  # fmt: skip


class Started:
    """A harvest in a process of its own."""

    def __init__(self, folder: Path, engine: str) -> None:
        self._engine = engine
        self._code: int | None = None
        if engine == "torchrun":
            launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1000", "--standalone"]
            words = [sys.executable, *launch, __file__, "--child", str(folder)]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self.pid = subprocess.Popen(words, start_new_session=True, **quiet).pid  # type: ignore[call-overload]
        else:
            self.pid = self._forked(folder)

    def _forked(self, folder: Path) -> int:
        child = os.fork()
        if child:
            return child
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Ray tells
        code = 1
        try:
            run(folder, self._engine)
            code = 0
        finally:
            os._exit(code)

    def ended(self) -> int | None:
        """The exit code, once it has ended."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, until: float = float("inf")) -> int | None:
        """Wait for its end, or for a moment."""
        while time.monotonic() < until and self.ended() is None:
            time.sleep(0.002)
        return self._code

    def workers(self) -> list[int]:
        """The processes that do parts for it."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
        if self._engine == "torchrun":
            return [int(pid) for pid, parent, _ in rows if int(parent) == self.pid]
        return [int(pid) for pid, _, words in rows if words.startswith("ray::") and "Worker" in words and _ours(pid)]

    def kill(self) -> None:
        """Kill all of it."""
        with contextlib.suppress(ProcessLookupError):  # it has not begun a group of its own yet
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()


def kill_until_done(folder: Path, kills: int, engine: str, chance: random.Random, usual: float) -> tuple[int, int]:
    """Kill at random moments until the harvest is complete, or enough were killed; then let it end.

    Returns how many workers, and how many drivers, were killed.
    """
    workers = drivers = 0
    harvest = Started(folder, engine)
    while workers + drivers < kills:
        if harvest.wait(time.monotonic() + chance.uniform(0.0, usual)) is not None:
            break
        found = harvest.workers() if engine != "local" else []
        if found and chance.random() < 0.6:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(found), signal.SIGKILL)  # the engine does the part again
                workers += 1
        else:
            harvest.kill()
            drivers += 1
            harvest = Started(folder, engine)
    while harvest.wait() != 0:
        harvest = Started(folder, engine)
    return workers, drivers


HOLD = """
import ray, sys
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def cluster(wanted: bool) -> Iterator[None]:
    """A cluster of Ray on this machine, which outlives its drivers."""
    if not wanted:
        yield
        return
    import ray  # noqa: F401  # before the forks, which then need not

    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", MARK: str(os.getpid())})
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], **pipes) as holder:
        assert holder.stdin
        assert holder.stdout
        os.environ["RAY_ADDRESS"] = holder.stdout.readline().strip()
        yield
        holder.stdin.close()


def _ours(pid: str) -> bool:
    """Whether a process carries the mark of this campaign: others may use Ray on this machine too."""
    try:
        return f"{MARK}={os.environ[MARK]}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def check(folder: Path, want: dict[str, str]) -> bool:
    """Whether every row is there once, and every byte as it should be."""
    acts = tt.open_harvest(folder)
    tokens = sum(len(sample["input_ids"]) for sample in make_data(SAMPLES))
    places = [
        (int(s), int(p))
        for batch in acts.batches(4096, *SITES)
        for s, p in zip(batch.sample, batch.position, strict=True)
    ]
    once = len(places) == len(set(places)) == tokens and acts.rows == tokens * len(SITES)
    other = sorted(set(contents(folder).items()) ^ set(want.items()))
    if other or not once:
        print(f"{folder}: {acts.rows} rows, complete {acts.complete}, files that differ: {other}")
    return once and acts.complete and not other


def campaign(engine: str, kills: int, base: Path, want: dict[str, str], chance: random.Random) -> bool:
    """Kill harvests of an engine so many times; return whether all of them came out right."""
    begun = time.monotonic()
    code = Started(base / f"{engine}-alone", engine).wait()
    usual = time.monotonic() - begun
    right = code == 0 and check(base / f"{engine}-alone", want)
    workers = drivers = harvests = 0
    while workers + drivers < kills:
        folder = base / f"{engine}-{harvests}"
        killed = kill_until_done(folder, kills - workers - drivers, engine, chance, usual)
        workers, drivers, harvests = workers + killed[0], drivers + killed[1], harvests + 1
        right &= check(folder, want)
        print(f"{engine}: {workers} workers and {drivers} drivers killed, {harvests} harvests, "
              f"{'every row once, all bytes the same' if right else 'WRONG'}", flush=True)  # fmt: skip
        shutil.rmtree(folder)
    return right


def main() -> int:
    """Kill, compare, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("--engine", choices=list(SHARES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    if options.child:
        run(options.child, "torchrun")
        return 0
    chance = random.Random(options.seed)
    engines = [options.engine] if options.engine else list(SHARES)
    with tempfile.TemporaryDirectory() as folder, cluster("ray" in engines):
        base = Path(folder)
        if Started(base / "whole", "local").wait() != 0:
            return 1
        want = contents(base / "whole")
        share = {engine: 1.0 if options.engine else SHARES[engine] for engine in engines}
        results = [campaign(e, round(options.kills * share[e]), base, want, chance) for e in engines]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
