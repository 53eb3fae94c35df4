"""The look-back ring: the last steps before a trigger are written too, none twice, within its bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensortap as tt
from tensortap.record.recorder import Recorder
from tensortap.record.step import Step
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import full, sample, stats
from tensortap.select.probes import probe
from tensortap.select.triggers import every, metric, nonfinite, spike
from tensortap.types import Place

HIGH = metric("loss") > 1


def play(recorder: Recorder, losses: list[float], probes: int = 1, size: int = 3) -> list[list[Step]]:
    """What each step, of one tensor holding the step's number, causes to be written. Nothing is released."""
    point = recorder.point(Place("a"), probes)
    written = []
    for loss in losses:
        value = np.full(size, recorder.current.number, np.float32)
        recorder.observe(point, buffer_of(value), value)
        written.append(recorder.close({"loss": loss}))
    return written


def rows(steps: list[Step]) -> list[tuple[int, str]]:
    """The rows that reach a run, with their reasons; the value must be that of the step."""
    found = []
    for step in steps:
        if not step.tensors_only:
            for record in step.records():
                assert record["mean"] == step.number == record.step
                found.append((step.number, record.reason))
    return found


def test_exactly_the_last_steps_are_written_and_none_twice() -> None:
    """When the trigger fires, the K steps before it are written first, in order; what was written is not again."""
    written = play(Recorder([probe("a", when=HIGH)], lookback=3), [0, 0, 0, 0, 0, 2, 0, 2, 0, 0, 0, 0, 2])
    back, now = "lookback: metric('loss') > 1", "metric('loss') > 1"
    assert [rows(steps) for steps in written] == [
        [], [], [], [], [],
        [(2, back), (3, back), (4, back), (5, now)],
        [],
        [(6, back), (7, now)],
        [], [], [], [],
        [(9, back), (10, back), (11, back), (12, now)],
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 2]), max_size=25), st.integers(0, 6), st.booleans())
def test_every_step_near_enough_before_a_trigger_is_written_once(losses: list[float], back: int, reuse: bool) -> None:
    """For any run of losses, a step is written exactly once if it fired or one of the next K did, else never."""
    recorder = Recorder([probe("a", when=HIGH)], lookback=back)
    point = recorder.point(Place("a"), 1)
    found: list[int] = []
    for loss in losses:
        value = np.full(3, recorder.current.number, np.float32)
        recorder.observe(point, buffer_of(value), value)
        for step in recorder.close({"loss": loss}):
            found += [number for number, _ in rows([step])]
            if reuse:
                recorder.release(step)
    wanted = [i for i in range(len(losses)) if any(loss > 1 for loss in losses[i : i + back + 1])]
    assert found == wanted


def test_without_look_back_nothing_is_held() -> None:
    """A step that did not fire is gone at once."""
    recorder = Recorder([probe("a", when=HIGH)])
    play(recorder, [0, 0])
    assert len(recorder.lookback) == 0 and recorder.lookback.nbytes == 0


def test_scheduled_steps_are_not_held() -> None:
    """A step that its number rules out costs nothing, in look-back neither."""
    recorder = Recorder([probe("a", when=every(2) & HIGH)], lookback=10)
    written = play(recorder, [0, 0, 0, 0, 2])
    assert [number for number, _ in rows(written[-1])] == [0, 2, 4]


def test_bytes_run_out_oldest_first_and_are_counted() -> None:
    """Tensors held in the ring count; what does not fit is let go, the oldest first, and counted."""
    size = 1 << 18  # a megabyte a step
    recorder = Recorder([probe("a", keep=full(), when=HIGH)], lookback=100, lookback_bytes=5 << 20)
    written = play(recorder, [0.0] * 20 + [2.0], size=size)
    numbers = [number for number, _ in rows(written[-1])]
    assert numbers == [16, 17, 18, 19, 20]
    assert [kept.array[0] for step in written[-1] for kept in step.table.tensors] == numbers
    assert recorder.counters.counts() == {"lookback_let_go_steps": 16}
    assert recorder.lookback.nbytes == 0


def test_the_ring_never_holds_more_than_it_may() -> None:
    """At no moment do the held tables take more than the bytes allowed."""
    recorder = Recorder([probe("a", keep=full(), when=HIGH)], lookback=50, lookback_bytes=1 << 20)
    point = recorder.point(Place("a"), 1)
    for number in range(60):
        value = np.zeros((number % 7 + 1) * 20_000, np.float32)
        recorder.observe(point, buffer_of(value))
        recorder.close({"loss": 0})
        assert recorder.lookback.nbytes <= 1 << 20
        assert recorder.lookback.nbytes == sum(held.step.nbytes for held in recorder.lookback._held)


def test_a_step_larger_than_the_ring_is_let_go_by_itself() -> None:
    """A step that can never fit is counted and does not stop the ring."""
    recorder = Recorder([probe("a", keep=full(), when=HIGH)], lookback=3, lookback_bytes=1 << 20)
    play(recorder, [0, 0], size=1 << 20)
    assert recorder.counters.counts() == {"lookback_let_go_steps": 2}
    assert [number for number, _ in rows(play(recorder, [0, 2])[-1])] == [2, 3]


def tensors(steps: list[Step]) -> Counter[tuple[int, str, int]]:
    return Counter((step.number, kept.kind, kept.probe) for step in steps for kept in step.table.tensors)


def test_one_probe_keeps_the_row_now_and_another_its_tensors_later() -> None:
    """The row is written once, when it closes; a later trigger brings the tensors that its probe kept, once."""

    def total(x: Any) -> float:
        return float(x.sum())

    recorder = Recorder(
        [probe("a", keep=[stats(), sample(1)]), probe("a", keep=[full(), total], when=HIGH)], lookback=2
    )
    written = play(recorder, [0, 0, 0, 2], probes=3)
    flat = [step for steps in written for step in steps]
    assert [number for number, _ in rows(flat)] == [0, 1, 2, 3]
    assert tensors(written[0]) == {(0, "sample", 1): 1}
    assert [(s.number, s.tensors_only) for s in written[3]] == [(1, True), (2, True), (3, False)]
    assert tensors(written[3]) == {
        (1, "full", 2): 1, (2, "full", 2): 1, (3, "sample", 1): 1, (3, "full", 2): 1,
    }  # fmt: skip
    assert all(kept.array[0] == step.number for step in flat for kept in step.table.tensors)
    # A row cannot be written twice, so the number goes with it although only the later trigger asked for it.
    assert [dict(next(step.records()).numbers) for step in flat if not step.tensors_only] == [
        {"total": 0.0}, {"total": 3.0}, {"total": 6.0}, {"total": 9.0},
    ]  # fmt: skip


def test_two_late_probes_take_what_is_theirs() -> None:
    """The first trigger writes the held row, the second only brings its own tensors; neither comes twice."""
    recorder = Recorder([probe("a", keep=full(), when=HIGH), probe("a", keep=sample(2), when=nonfinite())], lookback=5)
    written = play(recorder, [0, 0, 2, 0, float("nan")], probes=3)
    flat = [step for steps in written for step in steps]
    assert sorted(number for number, _ in rows(flat)) == [0, 1, 2, 3, 4]
    assert tensors(written[2]) == {(0, "full", 1): 1, (1, "full", 1): 1, (2, "full", 1): 1}
    assert tensors(written[4]) == {(n, "sample", 2): 1 for n in range(5)}
    assert [(s.number, s.tensors_only) for s in written[4]] == [(0, True), (1, True), (2, True), (3, False), (4, False)]
    assert rows(written[4]) == [(3, "lookback: nonfinite()"), (4, "nonfinite()")]


def test_steps_that_close_out_of_order_expire_by_their_number() -> None:
    """Steps that were open at once are held and let go by number, not by the order in which they closed."""
    recorder = Recorder([probe("a", when=HIGH)], lookback=2)
    point = recorder.point(Place("a"), 1)
    steps = [recorder.current, *(recorder.open() for _ in range(4))]
    for step in steps:
        value = np.full(3, step.number, np.float32)
        recorder.observe(point, buffer_of(value), step=step)
    for number in (1, 0, 3, 2):
        assert rows(recorder.close({"loss": 0}, step=steps[number])) == []
    assert [number for number, _ in rows(recorder.close({"loss": 2}, step=steps[4]))] == [2, 3, 4]


@pytest.mark.parametrize("released", [True, False])
def test_written_memory_is_used_again_without_harm(released: bool) -> None:
    """Giving tables back while others wait in the ring never changes what waits."""
    recorder = Recorder([probe("a"), probe("a", keep=full(), when=HIGH)], lookback=4)
    point = recorder.point(Place("a"), 3)
    seen = Counter[int]()
    for number in range(60):
        value = np.full(3, number, np.float32)
        recorder.observe(point, buffer_of(value), value)
        for step in recorder.close({"loss": 2 if number % 9 == 8 else 0}):
            seen.update(n for n, _ in rows([step]))
            assert all(kept.array[0] == step.number for kept in step.table.tensors)
            if released:
                recorder.release(step)
    assert seen == Counter(range(60))


@pytest.mark.parametrize("when", [spike("loss", factor=10), nonfinite(), metric("loss") > 50], ids=repr)
def test_whichever_trigger_fires_the_steps_before_are_written(tmp_path, when):
    """A spike, a NaN and a metric each bring the K steps before them, with their tensors; the program goes on."""
    with tt.watch(tt.probe("x", keep=full(), when=when), lookback=3, to=tmp_path / "run") as tap:
        for step in range(24):
            bad = step == 20
            tt.tap(np.array([step, np.nan if bad else 0.0]), "x")
            tap.step(loss=100.0 if bad else 1.0)
    run = tt.open(tmp_path / "run")
    assert run.steps == [17, 18, 19, 20]
    assert [run.tensor("x", step)[0] for step in run.steps] == run.steps
    assert [r.reason for r in run.records()] == [f"lookback: {when!r}"] * 3 + [repr(when)]
    assert run.metrics()["step"].to_pylist() == list(range(24))
