"""The recorder: which steps and rows are kept, why, and what goes wrong beside it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from recorded_steps import function, kept, play, see

from tensortap.record.counters import TensortapWarning
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.record.step import Step
from tensortap.reduce.reducers import full, histogram, quantiles, rows, sample, stats
from tensortap.reduce.summary import summarize
from tensortap.select.probes import Probe, probe
from tensortap.select.triggers import Answer, Trigger, at, every, metric, nonfinite
from tensortap.types import Place, StepOutcome


def test_a_metric_keeps_the_very_step_that_it_is_of() -> None:
    """The rows of the step with the high loss are kept, with their own values, and no others."""
    steps = play(Recorder([probe("a", when=metric("loss") > 1.0)]), [0.5, 2.0, 0.1, 3.0])
    assert kept(steps) == {1: ["metric('loss') > 1.0"], 3: ["metric('loss') > 1.0"]}
    assert [record["mean"] for step in steps for record in step.records()] == [1.0, 3.0]


def test_a_step_that_no_trigger_wants_is_not_touched() -> None:
    """Where every trigger says no, nothing is armed and nothing is reduced."""
    recorder = Recorder([probe("a", when=every(3)), probe("a", when=at([4]))])
    armed, seen = [], []
    for _ in range(6):
        armed.append(recorder.current.armed)
        seen.append(see(recorder, probes=3))
        recorder.close()
    assert armed == [1, 0, 0, 1, 2, 0]
    assert seen == [0, -1, -1, 0, 0, -1]


def test_before_and_after_are_asked_once_a_step() -> None:
    """A trigger with a history sees every step exactly once, whatever others say."""
    asked: list[tuple[str, int]] = []

    class Watchful(Trigger):
        def before(self, step: int) -> Answer:
            asked.append(("before", step))
            return Answer.YES if step == 1 else Answer.MAYBE

        def after(self, step: int, seen: StepOutcome) -> str | None:
            asked.append(("after", step))
            return "watchful" if step < 2 else None

    steps = play(Recorder([probe("a", when=Watchful())]), [0, 0, 0])
    assert kept(steps) == {0: ["watchful"], 1: ["watchful"]}
    assert asked == [
        ("before", 0),
        ("after", 0),
        ("before", 1),
        ("after", 1),
        ("before", 2),
        ("after", 2),
        ("before", 3),
    ]


def test_every_closed_step_comes_out_with_its_metrics() -> None:
    """A step without kept rows still hands its metrics on."""
    steps = play(Recorder([probe("a", when=at([9]))]), [0.5, 0.25])
    assert [(step.number, step.metrics, step.table.rows) for step in steps] == [
        (0, {"loss": 0.5}, 0),
        (1, {"loss": 0.25}, 0),
    ]


def test_a_step_without_rows_does_not_leak_into_the_next() -> None:
    """Memory handed back by a step that kept nothing is not taken for a table to record into."""
    recorder = Recorder([probe("a", when=metric("loss") > 1)])
    for number in range(20):
        see(recorder)
        for step in recorder.close({"loss": 2.0 if number % 3 == 0 else 0.0}):
            assert step.table.rows == (number % 3 == 0)
            recorder.release(step)


def test_several_probes_on_one_site_keep_their_own() -> None:
    """One row serves all probes; each keeps its own tensors and numbers, at its own steps."""

    def total(x: np.ndarray[Any, Any]) -> float:
        return float(x.sum())

    recorder = Recorder(
        [
            probe("a", keep=stats()),
            probe("a", keep=[full(), total], when=every(2)),
            probe("a", keep=[sample(2), quantiles(0.5)], when=metric("loss") > 1),
        ]
    )
    steps = play(recorder, [0, 2, 2], probes=7)
    assert kept(steps) == {
        0: ["every(1); every(2)"],
        1: ["every(1); metric('loss') > 1"],
        2: ["every(1); every(2); metric('loss') > 1"],
    }
    assert [[k.kind for k in step.table.tensors] for step in steps] == [["full"], ["sample"], ["full", "sample"]]
    assert [dict(next(step.records()).numbers) for step in steps] == [
        {"total": 0.0},
        {"q0.5": pytest.approx(1.0, rel=1 / 8)},
        {"total": 6.0, "q0.5": pytest.approx(2.0, rel=1 / 8)},
    ]


def test_a_histogram_is_taken_where_a_probe_wants_it() -> None:
    """Rows carry a histogram exactly at the steps and sites of a probe that keeps one."""
    recorder = Recorder([probe("a", keep=stats()), probe("b", keep=histogram(), when=every(2))])
    for _ in range(2):
        see(recorder, "a", probes=1)
        see(recorder, "b", probes=3)
        [step] = recorder.close()
        taken = [record["hist_counts"] is not None for record in step.records()]
        assert taken == [False, step.number % 2 == 0]


def test_calls_are_numbered_by_site_and_begin_anew_each_step() -> None:
    """The n-th call of a reused module is call n; a recomputed call repeats its number; sequence numbers go on."""
    recorder = Recorder([probe("**")])
    for _ in range(2):
        for name, recomputed in [("a", False), ("b", False), ("a", False), ("a", True), ("b", True), ("a", True)]:
            see(recorder, name, recomputed=recomputed)
        [step] = recorder.close()
        found = [(r.place.site, r.call, r.recomputed, r.seq) for r in step.records()]
        assert found == [
            ("a", 0, False, 0), ("b", 0, False, 1), ("a", 1, False, 2),
            ("a", 0, True, 3), ("b", 0, True, 4), ("a", 1, True, 5),
        ]  # fmt: skip


def test_a_step_grows_beyond_what_was_foreseen() -> None:
    """Thousands of rows, sites and histograms in one step all arrive."""
    recorder = Recorder([probe("**")])
    arrays = [np.random.default_rng(i).normal(size=20).astype(np.float32) for i in range(3000)]
    for i, x in enumerate(arrays):
        see(recorder, f"layer{i}", x)
    [step] = recorder.close()
    assert step.table.rows == 3000
    for i in (0, 255, 256, 2999):
        record, known = step.record(i), summarize(arrays[i])
        assert record.place.site == f"layer{i}" and record["mean"] == known.mean
        assert record["hist_counts"].tolist() == known.hist_counts.tolist()  # type: ignore[union-attr]


def test_nonfinite_keeps_the_step_with_the_nan() -> None:
    """NaN and infinities are counted in the row, and their step is kept."""
    recorder = Recorder([probe("**", when=nonfinite())])
    for bad in (0.0, np.nan, -np.inf, 1.0):
        see(recorder, "a")
        see(recorder, "b", np.array([bad, 1.0], np.float32))
        [step] = recorder.close()
        assert step.table.rows == (0 if np.isfinite(bad) else 2)
        assert [r["nan"] + r["neginf"] for r in step.records()] == ([] if np.isfinite(bad) else [0, 1])


def test_a_metric_that_is_not_finite_keeps_its_step() -> None:
    """`nonfinite()` looks at the metrics too."""
    assert list(kept(play(Recorder([probe("a", when=nonfinite())]), [1.0, float("nan")]))) == [1]


def test_full_is_what_the_tensor_was_when_it_was_seen() -> None:
    """A change in place after the tensor was seen reaches neither the copy nor the statistics."""
    recorder = Recorder([probe("a", keep=[full(), sample(2), rows([1])])])
    value = np.arange(6, dtype=np.float32).reshape(3, 2)
    see(recorder, value=value)
    value *= 100
    [step] = recorder.close()
    assert next(step.records())["max"] == 5
    assert {k.kind: k.array.max() <= 5 for k in step.table.tensors} == {"full": True, "sample": True, "rows": True}


def test_a_pause_lasts_until_resume() -> None:
    """Paused, nothing is recorded from this moment on; resumed, recording begins with the next step."""
    recorder = Recorder([probe("a")])
    rows_of: list[int] = []
    for number in range(6):
        if number == 1:
            see(recorder)
            recorder.pause()
        if number == 3:
            recorder.resume()
        see(recorder)
        rows_of.append(sum(step.table.rows for step in recorder.close()))
    assert rows_of == [1, 1, 0, 0, 1, 1]


def test_two_steps_are_open_at_once() -> None:
    """Each of two threads records into a step of its own, and they close in any order."""
    recorder = Recorder([probe("**")])
    first, second = recorder.open(), recorder.open()
    both = threading.Barrier(2)
    closed: dict[int, list[Step]] = {}

    def serve(step: OpenStep, value: float) -> None:
        both.wait()
        for _ in range(200):
            see(recorder, "request", np.full(5, value, np.float32), step=step)
        closed[step.number] = recorder.close({"latency": value}, step=step)

    threads = [threading.Thread(target=serve, args=pair) for pair in ((first, 1.0), (second, 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {first.number, second.number} == {1, 2} and recorder.current.number == 0
    for step, value in ((first, 1.0), (second, 2.0)):
        [done] = closed[step.number]
        assert done.metrics == {"latency": value} and done.table.rows == 200
        assert {record["mean"] for record in done.records()} == {value}
        assert [record.call for record in done.records()] == list(range(200))


def test_a_row_that_comes_after_its_step_closed_is_counted() -> None:
    """A thread that still reduces when its step closes changes nothing that was handed on."""
    recorder = Recorder([probe("a")])
    step = recorder.open()
    armed = step.armed
    see(recorder, step=step)
    [done] = recorder.close(step=step)
    step.armed = armed  # as a thread has it that looked before the step closed
    assert see(recorder, step=step) == -1
    assert done.table.rows == 1 and recorder.counters.counts() == {"late_records": 1}


def test_metrics_of_a_step_that_another_thread_has_closed_are_counted() -> None:
    """Two threads that close one step at the same moment give two sets of metrics: one is written, one counted."""
    recorder = Recorder([probe("a")])
    step = recorder.current
    [done] = recorder.close({"loss": 1.0}, step=step)
    assert recorder.close({"loss": 2.0, "rate": 0.1}, step=step) == [] and recorder.close(step=step) == []
    assert done.metrics == {"loss": 1.0} and recorder.counters.counts() == {"late_metrics": 2}


def test_a_metric_that_never_comes_is_said_once() -> None:
    """A trigger that reads a metric nobody gives is warned of once, with the names that were seen."""
    recorder = Recorder([probe("a", when=metric("los") > 1), probe("b", when=metric("acc") > 1)], start=5000)
    with pytest.warns(TensortapWarning, match=r"'los', which no step has given so far \(seen: acc, loss\)") as caught:
        for _ in range(300):
            recorder.close({"loss": 1.0, "acc": 0.0})
    assert len(caught) == 1 and "step(los=...)" in str(caught[0].message)
    assert recorder.counters.counts() == {"metrics_missing": 1}


def test_phases_are_kept_as_they_are_named() -> None:
    """A step's phase is on its rows, one of the user's own too."""
    recorder = Recorder([probe("a")])
    found = []
    for phase in ("train", "eval", "warm-up", ""):
        see(recorder)
        [step] = recorder.close(phase=phase)
        found.append(list(recorder.names.words["phase"])[int(step.table.columns["phase"][0])])
    assert found == ["train", "eval", "warm-up", ""]


def test_time_comes_from_the_clock_that_was_given() -> None:
    """With a clock, rows and steps carry its time in microseconds."""
    recorder = Recorder([probe("a")], clock=lambda: 12.5)
    see(recorder)
    [step] = recorder.close()
    assert step.time == 12_500_000 and next(step.records()).time == 12_500_000


def test_points_are_the_same_every_time() -> None:
    """A place and its probes have one handle; the place alone has one number."""
    recorder = Recorder([probe("a"), probe("a")])
    assert recorder.point(Place("a"), 1) is recorder.point(Place("a"), 1)
    assert recorder.point(Place("a"), 1).key == recorder.point(Place("a"), 3).key


def probes_of(count: int) -> list[Probe]:
    return [probe("a", keep=function(i)) for i in range(count)]


def test_as_many_probes_as_there_are_bits() -> None:
    """All 63 probes of a site get their row and their number."""
    recorder = Recorder(probes_of(63))
    see(recorder, probes=2**63 - 1)
    [step] = recorder.close()
    assert [value.number for value in step.table.values] == list(range(63))
