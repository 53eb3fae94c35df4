"""The writer: a bounded queue, one thread, and what happens when sinks fail, processes fork or end."""

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
from typing import Any

import numpy as np
import pytest

from tensortap.record.counters import Counters, TensortapWarning
from tensortap.record.recorder import Recorder
from tensortap.record.sink import Sink
from tensortap.record.step import Step
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import full
from tensortap.select.probes import probe
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.types import Place

MakeStep = Callable[..., Step]
BIG = np.zeros((1 << 18) + 1, np.float32)  # more than a megabyte: left to the thread


class Slow:
    """A sink that waits until it may go on."""

    def __init__(self) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        self.steps: list[int] = []
        self.closed = 0

    def write(self, step: Step) -> None:
        self.entered.set()
        assert self.go.wait(60)
        self.steps.append(step.number)

    def close(self) -> None:
        self.closed += 1

    def __str__(self) -> str:
        return "slow"


class Failing(Slow):
    def write(self, step: Step) -> None:
        self.steps.append(step.number)
        raise OSError(28, "No space left on device")


class FailingJournal(Failing):
    def append(self, step: Step) -> bool:
        raise OSError(28, "No space left on device")

    def tick(self) -> None: ...


def put_all(writer: Writer, make_step: MakeStep, numbers: range) -> None:
    for number in numbers:
        writer.put(make_step({"a": BIG}, number=number, keep=full(), metrics={"loss": 1.0}))


def test_a_full_queue_drops_and_counts(make_step: MakeStep) -> None:
    """With `drop`, steps that do not fit are let go and counted, and `put` never waits."""
    sink, counters = Slow(), Counters()
    writer = Writer([sink], counters=counters, queue_bytes=4 << 20, when_full="drop")
    put_all(writer, make_step, range(1))
    assert sink.entered.wait(60)
    put_all(writer, make_step, range(1, 10))
    assert counters.counts() == {"dropped_steps": 7}
    sink.go.set()
    writer.close()
    assert sink.steps == [0, 1, 2]


def test_a_full_queue_blocks_until_there_is_room(make_step: MakeStep) -> None:
    """With `block`, `put` waits for the sink, and nothing is lost."""
    sink, counters = Slow(), Counters()
    writer = Writer([sink], counters=counters, queue_bytes=4 << 20)
    done = threading.Event()

    def produce() -> None:
        put_all(writer, make_step, range(10))
        done.set()

    producer = threading.Thread(target=produce)
    producer.start()
    assert sink.entered.wait(60)
    assert not done.wait(0.2)  # it could only be done if it did not wait at all
    assert writer._queued_bytes <= 4 << 20
    sink.go.set()
    producer.join()
    writer.close()
    assert sink.steps == list(range(10)) and counters.counts() == {}


def test_a_step_larger_than_the_queue_goes_through_alone(make_step: MakeStep) -> None:
    """A step that can never fit is written all the same, one at a time."""
    for when_full in ("block", "drop"):
        sink = Slow()
        sink.go.set()
        writer = Writer([sink], queue_bytes=1000, when_full=when_full)  # type: ignore[arg-type]
        for number in range(5):
            writer.put(make_step({"a": BIG}, number=number, keep=full()))
            writer.flush()
        writer.close()
        assert sink.steps == list(range(5))


def test_what_the_run_folder_has_is_not_counted_as_dropped(make_step: MakeStep, tmp_path: Path) -> None:
    """A step that other sinks had no room for is whole in the run folder; only its large tensors are missing."""
    sink, counters = Slow(), Counters()
    folder = RunFolder(tmp_path / "run", counters=counters)
    writer = Writer([sink, folder], counters=counters, queue_bytes=3 << 20, when_full="drop")
    put_all(writer, make_step, range(1))
    assert sink.entered.wait(60)
    put_all(writer, make_step, range(1, 5))
    sink.go.set()
    writer.close()
    run = open_run(tmp_path / "run")
    assert run.steps == [0, 1, 2, 3, 4] and sink.steps == [0, 1]
    assert run.counts == {"dropped_steps": 3, "dropped_tensors": 3}
    assert {key.step for key, _ in run.tensors()} == {0, 1}


def test_flush_waits_for_everything_handed_over(make_step: MakeStep) -> None:
    """After `flush`, every sink has every step."""
    sink = Slow()
    writer = Writer([sink])
    put_all(writer, make_step, range(5))
    threading.Timer(0.05, sink.go.set).start()
    writer.flush()
    assert sink.steps == list(range(5)) and not sink.closed
    writer.close()


def test_closing_twice_closes_once(make_step: MakeStep) -> None:
    """`close` writes everything and closes every sink once, however often it is called."""
    sink = Slow()
    sink.go.set()
    writer = Writer([sink])
    put_all(writer, make_step, range(3))
    writer.close()
    writer.close()
    assert sink.steps == [0, 1, 2] and sink.closed == 1


def test_a_step_after_close_is_counted(make_step: MakeStep) -> None:
    """A step that comes after everything was closed is not written, and that is said once."""
    counters = Counters()
    writer = Writer([Slow()], counters=counters)
    writer.close()
    with pytest.warns(TensortapWarning, match="after everything was closed") as caught:
        put_all(writer, make_step, range(3))
    assert len(caught) == 1 and counters.counts() == {"dropped_records": 3, "dropped_steps": 3}


@pytest.mark.parametrize("failing", [Failing, FailingJournal])
def test_a_failing_sink_is_counted_and_warned_of_once(make_step: MakeStep, failing: type[Any]) -> None:
    """A sink's errors are counted, said once, and reach neither the user's step nor the other sinks."""
    bad, good, counters = failing(), Slow(), Counters()
    good.go.set()
    writer = Writer([bad, good], counters=counters)
    with pytest.warns(TensortapWarning, match="writing to slow failed: OSError.*No space left") as caught:
        put_all(writer, make_step, range(4))
        writer.close()
    assert len(caught) == 1 and counters.counts()["sink_errors"] == 4
    assert good.steps == [0, 1, 2, 3] and good.closed == bad.closed == 1
    if failing is FailingJournal:
        assert counters.counts()["dropped_steps"] == counters.counts()["dropped_records"] == 4


@pytest.mark.filterwarnings("ignore::tensortap.record.counters.TensortapWarning")
def test_strict_raises_a_journals_error_at_once(make_step: MakeStep) -> None:
    """With `strict`, the error of the run folder comes out of the step that caused it."""
    writer = Writer([FailingJournal()], counters=Counters(strict=True))
    with pytest.raises(OSError, match="No space left"):
        put_all(writer, make_step, range(1))
    writer.close()


@pytest.mark.filterwarnings("ignore::tensortap.record.counters.TensortapWarning")
def test_strict_raises_a_sinks_error_at_the_next_chance(make_step: MakeStep) -> None:
    """With `strict`, an error on the thread comes out of the next call, and the writer can still be closed."""
    sink = Failing()
    writer = Writer([sink], counters=Counters(strict=True))
    put_all(writer, make_step, range(1))
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    put_all(writer, make_step, range(1, 2))
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert sink.closed == 1


def test_a_warning_that_raises_does_not_end_the_thread(make_step: MakeStep) -> None:
    """Under `python -W error` the thread goes on writing after a sink failed."""
    bad, good = Failing(), Slow()
    good.go.set()
    writer = Writer([bad, good])  # this test suite turns warnings into errors
    put_all(writer, make_step, range(3))
    writer.close()
    assert good.steps == [0, 1, 2] and writer.counters.counts() == {"sink_errors": 3}


def test_a_sink_that_ends_its_thread_does_not(make_step: MakeStep) -> None:
    """Even SystemExit from a sink leaves the writer running."""

    class Quitting(Slow):
        def write(self, step: Step) -> None:
            raise SystemExit(3)

    good = Slow()
    good.go.set()
    writer = Writer([Quitting(), good])
    put_all(writer, make_step, range(3))
    writer.close()
    assert good.steps == [0, 1, 2]


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
