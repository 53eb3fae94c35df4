"""The budget: observing stays below its share of the step time, thins itself, and never thins triggers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensortap as tt
from tensortap.record.budget import Budget
from tensortap.record.recorder import Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.select.probes import probe
from tensortap.types import Place


def drive(budget, cost, bare, steps):
    """Run steps of `bare` seconds, of which an observed one costs `cost` more; which were observed."""
    observed = []
    for step in range(steps):
        if budget.allows():
            observed.append(step)
            budget.closed(cost, bare + cost, True)
        else:
            budget.closed(0.0, bare, False)
    return observed


@settings(derandomize=True, deadline=None)
@given(st.floats(0.005, 0.5), st.floats(1e-5, 10.0), st.floats(1e-4, 1.0))
def test_the_share_is_kept_to_within_one_observed_step(share, cost, bare):
    """Whatever a step and its observation cost, in the long run observing stays within its share."""
    budget = Budget(share)
    observed = drive(budget, cost, bare, 400)
    assert observed[0] == 0
    assert budget.own <= share * 400 * bare + cost + 1e-9


def test_cheap_observation_is_not_thinned():
    """When observing costs less than its share every step is observed."""
    assert drive(Budget(0.1), 0.001, 1.0, 50) == list(range(50))


def test_the_first_steps_may_be_free():
    """Steps that are free are observed whatever they cost, and the share is kept from then on."""
    budget = Budget(0.1, free_steps=20)
    observed = drive(budget, 0.5, 1.0, 120)
    assert observed[:20] == list(range(20))
    assert len(observed[20:]) == pytest.approx(100 * 0.1 / 0.5, abs=2)


@pytest.mark.parametrize("stretch", [4, 16])
def test_steps_in_stretches(stretch):
    """Observed steps come in stretches, so far apart that the share is kept."""
    budget = Budget(0.05, stretch=stretch)
    observed = drive(budget, 0.2, 1.0, 1000)
    begun = [step for step in observed if step - 1 not in observed]
    assert all(step + i in observed for step in begun[:-1] for i in range(stretch))
    assert budget.own <= 0.05 * 1000 + 0.2 * stretch
    assert len(observed) == pytest.approx(250, abs=2 * stretch)


def test_a_schedule_may_be_spared():
    """A probe with a schedule keeps all of its steps, and what it costs is charged to those that want every one."""
    probes = [probe("**"), probe("rare", when=tt.every(10))]
    recorder = Recorder(probes, budget=Budget(0.01, every_step_only=True), clock=lambda: 0.0)
    armed = []
    for _ in range(40):
        armed.append(recorder.current.armed)
        recorder.account.closed(0.5 if armed[-1] & 1 else 0.0, 1.0, bool(armed[-1]))
        recorder.close()
    assert [step for step, bits in enumerate(armed) if bits & 2] == [0, 10, 20, 30]
    assert [step for step, bits in enumerate(armed) if bits & 1] == [0]
    assert recorder.counters.counts()["thinned_steps"] >= 38


def test_a_pause_in_the_training_buys_no_burst():
    """A long evaluation in between does not let many costly steps through at once."""
    budget = Budget(0.01)
    drive(budget, 0.5, 1.0, 10)
    budget.closed(0.0, 10_000.0, False)
    assert len(drive(budget, 0.5, 1.0, 20)) <= 3


def test_histograms_are_thinned_when_observed_steps_are_far_apart():
    """Where the budget allows a step only now and then, most of those come without histograms."""
    budget = Budget(0.01)
    taken = []
    for _ in range(2000):
        if budget.allows():
            taken.append(budget.histograms())
            budget.closed(1.0, 2.0, True)
        else:
            budget.closed(0.0, 1.0, False)
    assert taken[0] and not all(taken) and any(taken[4:])


@pytest.mark.parametrize("share", [0, -0.1, 1, 2])
def test_a_share_that_is_none_is_refused(share):
    """The error shows how a share is written."""
    with pytest.raises(tt.TensortapError, match=r"budget=0\.02 for 2 %"):
        Budget(share)


def test_the_recorder_thins_steps_and_says_so_but_never_triggers():
    """A step the budget forbids has no rows of plain probes, and all rows of probes with a trigger."""
    budget = Budget(0.01)
    recorder = Recorder([probe("a"), probe("b", when=tt.metric("loss") > 0)], budget=budget)
    a, b = recorder.point(Place("a"), 1), recorder.point(Place("b"), 2)
    x = np.ones(4, np.float32)
    kept = []
    for _ in range(5):
        for point in (a, b):
            recorder.observe(point, buffer_of(x))
        kept += [str(r.place) for step in recorder.close({"loss": 1.0}) for r in step.records()]
        recorder.account.closed(1.0, 1.001, True)
    assert kept.count("b:output") == 5 and kept.count("a:output") < 5
    assert recorder.counters.counts()["thinned_steps"] == 5 - kept.count("a:output") + 1  # the one now open as well


def test_thinned_histograms_are_absent_and_counted():
    """When only histograms are thinned the statistics are there all the same."""
    budget = Budget(0.5)
    budget.histograms = lambda: False
    recorder = Recorder([probe("a")], budget=budget)
    recorder.observe(recorder.point(Place("a"), 1), buffer_of(np.ones(4, np.float32)))
    (step,) = recorder.close()
    (record,) = step.records()
    assert record["hist_counts"] is None and record["mean"] == 1.0
    assert recorder.counters.counts()["thinned_histograms"] >= 1


def test_cost_is_reported_by_site(tmp_path):
    """The tap knows what observing has cost, in all and at each site, without a budget too."""
    with tt.watch(to=tmp_path / "run") as tap:
        for _ in range(5):
            tt.tap(np.zeros(200_000, np.float32), "large")
            tt.tap(np.zeros(2, np.float32), "small")
            tap.step()
    assert tap.cost.steps == 5 and tap.cost.seconds > 0
    assert tap.cost.by_site["large:output"] > tap.cost.by_site["small:output"] > 0
    assert "% of the step time" in str(tap.cost) and "large:output" in str(tap.cost)
