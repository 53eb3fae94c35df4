"""How a process that records may end, and children that it forks."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.record.test_writer import Slow

from tensortap.record.counters import Counters
from tensortap.record.recorder import Recorder
from tensortap.record.sink import Sink
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import full
from tensortap.select.probes import probe
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.types import Place


def start(path: Path, sinks: list[Sink] | None = None) -> tuple[Recorder, Writer, Callable[[], None]]:
    """A recorder that writes to a run folder, and a function that does one step."""
    counters = Counters()
    recorder = Recorder([probe("**", keep=full())], counters=counters)
    writer = Writer([RunFolder(path, counters=counters), *(sinks or [])], counters=counters, release=recorder.release)
    point = recorder.point(Place("a"), 1)

    def step() -> None:
        recorder.observe(point, buffer_of(np.full(4, recorder.current.number, np.float32)))
        for finished in recorder.close({"loss": 1.0}):
            writer.put(finished)

    return recorder, writer, step


def files_of(path: Path) -> dict[str, int]:
    return {str(p): p.stat().st_size for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_forked_child_writes_nothing_and_the_parent_goes_on(tmp_path: Path) -> None:
    """A child forked in the middle may call anything and exit in its own time: the parent's files are unharmed."""
    sink = Slow()
    recorder, writer, step = start(tmp_path / "run", [sink])
    step()
    assert sink.entered.wait(60)  # the thread is busy, and the queue is not empty, at the moment of the fork
    step()
    before = files_of(tmp_path)
    child = os.fork()
    if not child:
        status = 9
        try:
            for _ in range(50):
                step()
            writer.flush()
            writer.close()
            status = 0 if recorder.current.armed == 0 else 8
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert files_of(tmp_path) == before
    sink.go.set()
    step()
    assert open_run(tmp_path / "run").state == "live"
    writer.close()
    run = open_run(tmp_path / "run")
    assert run.steps == [0, 1, 2] and run.state == "finished" and run.counts == {}
    assert run.table()["mean"].to_pylist() == [0, 1, 2] and sink.steps == [0, 1, 2]


def test_a_child_that_is_forked_while_locks_are_held_does_not_hang(tmp_path: Path) -> None:
    """Locks that another thread held at the fork do not block the child."""
    recorder, writer, step = start(tmp_path / "run")
    step()
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with recorder._lock, recorder.counters._lock, writer._changed:
            held.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)
        step()
        recorder.counters.add("anything")
        writer.close()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    leave.set()
    holder.join()
    writer.close()
    assert status == 0


def _work(step: Callable[[], None], number: int) -> int:
    step()
    return number * 2


def test_forked_workers_like_a_data_loaders(tmp_path: Path) -> None:
    """Worker processes of multiprocessing's fork neither write nor hang, at their start, in their work or at exit."""
    _, writer, step = start(tmp_path / "run")
    step()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=lambda n=n: results.put(_work(step, n))) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert sorted(results.get() for _ in workers) == [0, 2, 4]
    step()
    writer.close()
    assert open_run(tmp_path / "run").table()["step"].to_pylist() == [0, 1]


SCRIPT = """
import os, signal, sys, threading
import numpy as np
import tensortap as tt
path, how = sys.argv[1:]
def own(number, frame):
    print("own handler", flush=True)
    sys.exit(7)
if how == "own":
    signal.signal(signal.SIGTERM, own)
tap = tt.watch(tt.probe("**", keep=tt.full()), to=[path + "/run", tt.JsonLines(path + "/records.jsonl")])
for number in range(20):
    tt.tap(np.full(300_000, number, np.float32), "big")
    tap.step(loss=number)
if how == "closed":
    tap.close()
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
if how in ("term", "own", "closed"):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(600):
        threading.Event().wait(0.05)
if how == "waiting":
    print("ready", flush=True)
    for _ in range(1200):  # Python runs a handler when the main thread next runs Python: not in one long wait
        threading.Event().wait(0.05)
if how == "error":
    raise ValueError("the user's own")
"""


def run_script(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), how], capture_output=True, text=True, timeout=120, check=False
    )


def assert_all_written(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run")
    assert run.state == "finished" and run.steps == list(range(20))
    assert [float(run.tensor("big", step)[-1]) for step in range(20)] == list(range(20))
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(20))
    assert not list(tmp_path.rglob("*.arrows"))


def test_sigterm_writes_everything_and_ends_the_process_as_ever(tmp_path: Path) -> None:
    """On SIGTERM large tensors and other sinks are flushed, the run is closed, and the status is the signal's."""
    ended = run_script(tmp_path, "term")
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert_all_written(tmp_path)


def test_sigterm_from_outside(tmp_path: Path) -> None:
    """A process that waits is told to end by another, and flushes."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "waiting"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.terminate()
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGTERM
    assert_all_written(tmp_path)


def test_a_normal_exit_without_close_writes_everything(tmp_path: Path) -> None:
    """A script that just ends loses nothing."""
    ended = run_script(tmp_path, "exit")
    assert ended.returncode == 0 and ended.stderr == ""
    assert_all_written(tmp_path)


def test_an_exception_without_close_writes_everything(tmp_path: Path) -> None:
    """A script that dies of its own error loses nothing, and shows its own error."""
    ended = run_script(tmp_path, "error")
    assert ended.returncode == 1 and ended.stderr.endswith("ValueError: the user's own\n")
    assert_all_written(tmp_path)


def test_the_users_own_handler_is_left_alone(tmp_path: Path) -> None:
    """Where the user handles SIGTERM, that handler runs and decides; exit still flushes."""
    ended = run_script(tmp_path, "own")
    assert ended.returncode == 7 and "own handler" in ended.stdout
    assert_all_written(tmp_path)


def test_after_close_the_handler_is_gone(tmp_path: Path) -> None:
    """Closing leaves no handler behind."""
    ended = run_script(tmp_path, "closed")
    assert ended.returncode == -signal.SIGTERM and ended.stdout == "True\n"
    assert_all_written(tmp_path)


def test_the_handler_is_there_only_while_a_writer_lives() -> None:
    """Two writers share one handler, and the last one to close takes it away."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    first, second = Writer([Slow()]), Writer([Slow()])
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    first.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_recording_does_not_import_pandas(tmp_path: Path) -> None:
    """A process that records, seals and closes a run has not loaded pandas, polars or a framework for it."""
    code = (
        SCRIPT
        + """
tap.close()
loaded = {"pandas", "polars", "torch", "tensorflow", "jax", "duckdb"} & set(sys.modules)
assert not loaded, loaded
"""
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), "exit"], check=True, timeout=60)
