"""The writer: a bounded queue, one thread, and what happens when sinks fail, processes fork or end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import ends, interrupted_behind_locks

from tensortap.record.counters import Counters, TensortapWarning
from tensortap.record.step import Step
from tensortap.record.writer import Writer
from tensortap.reduce.reducers import full
from tensortap.sinks.memory import Memory
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run

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


@pytest.mark.parametrize("method", ["put", "flush", "close"])
def test_an_interrupt_leaves_no_lock_behind(method: str, make_step: MakeStep) -> None:
    """After Ctrl-C in any of its methods the thread still writes what it was given, and `close` ends."""
    memory = Memory()
    writer = Writer([memory])
    writer.put(make_step({"a": np.ones(3)}))
    writer.flush()
    given = [make_step({"a": np.ones(3)}, number=1)] if method == "put" else []
    with interrupted_behind_locks():
        getattr(writer, method)(*given)
    assert ends(writer.close) and memory.records[0].step == 0


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
