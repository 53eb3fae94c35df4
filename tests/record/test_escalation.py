"""Escalation: more is kept for some steps after a trigger, and then no longer."""

import numpy as np

import tensortap as tt


def record(tmp_path, *probes, steps=10, bad=3):
    with tt.watch(*probes, to=tmp_path / "run") as tap:
        for step in range(steps):
            x = np.ones(4, np.float32)
            if step == bad:
                x[0] = np.nan
            tt.tap(x, "x")
            tap.step(loss=float(step))
    return tap.run


def test_detail_is_raised_after_the_trigger_and_falls_back(tmp_path):
    """Whole tensors are kept for exactly the steps after the one that was not finite."""
    run = record(tmp_path, tt.probe("**", keep=tt.stats(), escalate=tt.escalation(keep=tt.full(), steps=2)))
    assert [key.step for key, _ in run.tensors()] == [4, 5]
    assert run.steps == list(range(10))


def test_a_second_trigger_prolongs_it(tmp_path):
    """Each time the trigger fires the steps are counted anew."""
    escalate = tt.escalation(keep=tt.full(), when=lambda step, metrics: step in (2, 4), steps=3)
    run = record(tmp_path, tt.probe("**", keep=tt.stats(), escalate=escalate))
    assert [key.step for key, _ in run.tensors()] == [3, 4, 5, 6, 7]


def test_other_sites_may_be_escalated_to(tmp_path):
    """The detail may be raised at sites of its own."""
    with tt.watch(
        tt.probe("a", keep=tt.stats(), escalate=tt.escalation("b", keep=tt.stats(), steps=1)), to=tmp_path / "run"
    ) as tap:
        for step in range(4):
            tt.tap(np.array([np.inf if step == 1 else 1.0]), "a")
            tt.tap(np.ones(2), "b")
            tap.step()
    assert {r.step for r in tap.run.records(sites="b")} == {2}


def test_the_reason_says_what_it_follows(tmp_path):
    """A record kept by escalation says after which trigger."""
    run = record(tmp_path, tt.probe("**", keep=tt.stats(), escalate=tt.escalation(keep=tt.full(), steps=1)))
    assert "following(nonfinite(), 1)" in run.table(steps=4)["reason"][0].as_py()


def test_a_probe_used_twice_does_not_share_its_escalation(tmp_path):
    """What happened under one tap does not escalate another."""
    shared = tt.probe("**", keep=tt.stats(), escalate=tt.escalation(keep=tt.full(), steps=5))
    record(tmp_path / "one", shared, bad=9)
    run = record(tmp_path / "two", shared, bad=-1)
    assert not list(run.tensors())
