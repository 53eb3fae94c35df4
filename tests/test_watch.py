"""`watch` without a model: values named by `tap` go down the whole line."""

from __future__ import annotations

import gc
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import tensortap as tt
from tensortap.errors import ProbeError, RunExistsError, TensortapError


def test_named_values_arrive_in_the_run(tmp_path: Path) -> None:
    """What `tap` names is recorded, returned unchanged, and read back."""
    x = np.arange(6, dtype=np.float32)
    with tt.watch(to=tmp_path / "run") as tap:
        for step in range(3):
            assert tt.tap(x, "my/value") is x
            tap.step(loss=step)
        assert tap.run.state == "live" and tap.run.steps == [0, 1, 2]
    assert tap.run.state == "finished" and tap.run.sites == ["my/value:output"]
    assert tap.run.metrics()["value"].to_pylist() == [0, 1, 2] and tap.counts == {}


def test_outside_the_block_nothing_is_seen(tmp_path: Path) -> None:
    """Before and after, `tap` only gives its value back."""
    memory = tt.Memory()
    tt.tap(np.ones(2), "before")
    with tt.watch(to=memory):
        tt.tap(np.ones(2), "inside")
    tt.tap(np.ones(2), "after")
    assert [record.place.site for record in memory.records] == ["inside"]


def test_several_taps_watch_at_once(tmp_path: Path) -> None:
    """Each tap sees what its own patterns name, and counts its own steps."""
    one, two = tt.Memory(), tt.Memory()
    with tt.watch("a", to=one) as first, tt.watch("**", to=two):
        for name in ("a", "b"):
            tt.tap(np.ones(2), name)
        first.step()
        tt.tap(np.ones(2), "a")
    assert [(r.step, r.place.site) for r in one.records] == [(0, "a"), (1, "a")]
    assert [(r.step, r.place.site) for r in two.records] == [(0, "a"), (0, "b"), (0, "a")]


def test_a_value_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    """A value of another kind is given back, warned of once and counted; with `strict` it raises."""
    with tt.watch(to=tt.Memory()) as tap:
        with pytest.warns(tt.TensortapWarning, match="recording 'text' failed"):
            assert [tt.tap("hello", "text") for _ in range(3)] == ["hello"] * 3
        assert tap.counts == {"skipped_values": 3}
    with pytest.warns(tt.TensortapWarning), tt.watch(to=tt.Memory(), strict=True), pytest.raises(TensortapError):
        tt.tap("hello", "text")


def test_pause_and_resume(tmp_path: Path) -> None:
    """Paused, values pass unseen."""
    memory = tt.Memory()
    with tt.watch(to=memory) as tap:
        for step in range(4):
            if step == 1:
                tap.pause()
            if step == 2:
                tap.resume()
            tt.tap(np.ones(2), "a")
            tap.step()
    assert [record.step for record in memory.records] == [0, 3]


def test_a_run_is_resumed_after_its_last_step(tmp_path: Path) -> None:
    """Resumed, steps go on from where anything was written, be it only a metric."""
    for _ in range(2):
        with tt.watch(tt.probe("**", when=tt.every(3)), to=tmp_path / "run", resume=True) as tap:
            for _ in range(5):
                tt.tap(np.ones(2), "a")
                tap.step(loss=1.0)
    run = tt.open(tmp_path / "run")
    assert run.metrics()["step"].to_pylist() == list(range(10)) and run.steps == [0, 3, 6, 9]


def test_mistakes_at_set_up_raise(tmp_path: Path) -> None:
    """Bad arguments raise before anything is made, and name the corrected call."""
    with pytest.raises(ProbeError, match="when_full must be 'block' or 'drop', got 'wait'"):
        tt.watch(to=tt.Memory(), when_full="wait")  # type: ignore[arg-type]
    with tt.watch(to=tmp_path / "run"):
        pass
    with pytest.raises(RunExistsError, match="resume=True"):
        tt.watch(to=tmp_path / "run")
    with tt.watch(to=tmp_path / "run", overwrite=True):
        pass


def test_threads_name_values_at_once(tmp_path: Path) -> None:
    """Values named by several threads within one step are all in it."""
    with tt.watch(to=tmp_path / "run") as tap:
        threads = [
            threading.Thread(target=lambda n=n: [tt.tap(np.full(3, n), f"thread{n}") for _ in range(100)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tap.step()
    rows = tap.run.table().to_pylist()
    assert len(rows) == 400 and all(row["mean"] == int(row["site"][-1]) for row in rows)


def test_closing_twice_and_without_a_run(tmp_path: Path) -> None:
    """A second close does nothing, and a tap without a run folder says so."""
    tap = tt.watch(to=tt.Memory())
    tap.close()
    tap.close()
    with pytest.raises(TensortapError, match="to='runs/exp1'"):
        tap.run  # noqa: B018


def test_a_tap_says_in_a_line_what_it_is(tmp_path: Path) -> None:
    """Its repr tells what is watched, whether it is open, its probes, the steps so far and where they go."""
    memory, path = tt.Memory(), tmp_path / "run"
    with tt.watch("a", tt.probe("b", when=tt.every(3)), to=[memory, path]) as tap:
        assert repr(tap) == f"<Tap on values: open, 2 probes, 0 steps, to {path} and Memory>"
        tap.step()
        tap.pause()
        assert repr(tap) == f"<Tap on values: paused, 2 probes, 1 step, to {path} and Memory>"
    assert repr(tap).startswith("<Tap on values: closed, 2 probes, 1 step,")


def test_the_tap_of_a_model_names_its_class() -> None:
    """A model is named by its class, also when it is gone; a rank that records nothing says so."""

    class Net:
        def __init__(self) -> None:
            self.act = np.tanh

        def __call__(self, x: object) -> object:
            return self.act(x)

    net = Net()
    with tt.watch(net, to=tt.Memory()) as tap:
        net(np.ones(2))
        net(np.ones(2))
    del net
    assert repr(tap) == "<Tap on Net: closed, 1 probe, 2 steps, to Memory>"
    with tt.watch("a", rank=1, ranks=0, to=tt.Memory()) as tap:
        assert repr(tap) == "<Tap on nothing: open, 0 probes, 0 steps, to nowhere>"


def test_a_metric_beyond_the_floats_is_recorded_as_infinite() -> None:
    """An integer that no float holds ends no training: it is infinite, counted, and warned of once."""
    memory = tt.Memory()
    with tt.watch(to=memory) as tap:
        tt.tap(np.ones(2), "seen")
        with pytest.warns(tt.TensortapWarning, match="is too large for a float"):
            tap.step(x=10**400, y=-(10**400), z=1)
        tap.step(x=10**400)
    assert memory.metrics == {0: {"x": math.inf, "y": -math.inf, "z": 1.0}, 1: {"x": math.inf}}
    assert tap.counts == {"overflowed_metrics": 3}


def test_a_metric_that_is_no_number_does_not_end_a_training(tmp_path):
    """None means that there is none in this step; anything else is left out, counted and warned of, or raised."""
    with tt.watch(to=tmp_path / "run") as tap:
        with pytest.warns(tt.TensortapWarning, match="metric 'loss' must be a number, got 'high'"):
            tap.step(loss="high", val=None, rate=1.0)
        tap.step(loss=np.ones(2), rate=2.0)
    assert tap.counts["refused_metrics"] == 2
    assert [(row["name"], row["step"]) for row in tap.run.metrics().to_pylist()] == [("rate", 0), ("rate", 1)]
    with tt.watch(to=tt.Memory(), strict=True) as strict, pytest.raises(ProbeError, match="got 'high'"):
        strict.step(loss="high")


def test_a_misspelt_metric_is_told_however_short_the_training_was():
    """A trigger that reads what no step gave is spoken of when the tap closes."""
    tap = tt.watch(tt.probe("**", when=tt.metric("los") > 1), to=tt.Memory())
    tap.step(loss=2.0)
    with pytest.warns(tt.TensortapWarning, match=r"reads the metric 'los', which no step has given .*seen: loss"):
        tap.close()


@pytest.mark.parametrize("lookback", ["x", -1, 1.5, True])
def test_lookback_is_a_number_of_steps(lookback):
    """Anything else is refused when watching begins."""
    with pytest.raises(ProbeError, match=r"lookback= must be a number of steps from 0 up, got"):
        tt.watch(to=tt.Memory(), lookback=lookback)


@pytest.mark.parametrize(
    "wrong",
    [{"budget": 5}, {"budget": "2%"}, {"start": "a"}, {"queue_bytes": -1}, {"lookback_bytes": 1.5}, {"rank": "first"},
     {"fast_path": "quick"}, {"when_full": "wait"}],
)  # fmt: skip
def test_a_wrong_option_is_refused_before_a_run_is_overwritten(tmp_path, wrong):
    """The error names the option and its value, and the run that was there stays."""
    with tt.watch(to=tmp_path / "run") as tap:
        tt.tap(np.ones(2), "x")
        tap.step()
    [(name, value)] = wrong.items()
    with pytest.raises(ProbeError, match=rf"{name}.* must be .*, got {value!r}"):
        tt.watch(to=tmp_path / "run", overwrite=True, **wrong)
    assert tt.open(tmp_path / "run").steps == [0]


def test_two_models_are_refused():
    """What looks like a second model among the probes is named, with what to write."""

    class Model:
        def named_modules(self):
            return []

    with pytest.raises(ProbeError, match="watch\\(\\) takes one model, then patterns and probes; got a Model"):
        tt.watch("**", Model())


def test_steps_that_nobody_wants_are_numbered_like_others() -> None:
    """However many are passed by, wanted ones come at their numbers, also beside metrics, pauses and other steps."""
    memory, x = tt.Memory(), np.ones(3)
    with tt.watch(tt.probe("**", keep=tt.stats(), when=tt.at([3, 270, 600, 1000])), to=memory) as tap:
        for number in range(1100):
            assert tap.recorder.current.number == number
            tt.tap(x, "x")
            if number == 500:
                tap.pause()
            if number == 700:
                tap.resume()
            tap.step(**({"loss": 1.0} if number % 97 == 0 else {}))
    assert [record.step for record in memory.records] == [3, 270, 1000]
    assert tap.cost.steps == 1100


def test_a_span_takes_a_number_between_steps_that_are_passed_by() -> None:
    """Numbers are given out once, whoever takes them."""
    seen = []
    with tt.watch(tt.probe("**", keep=tt.stats(), when=tt.at([10**6])), to=tt.Memory()) as tap:
        for _ in range(5):
            for _ in range(3):
                seen.append(tap.recorder.current.number)
                tap.step()
            seen.append(tap.recorder.open().number)  # as a span does
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("enabled", [True, False])
def test_attaching_leaves_the_garbage_collector_as_it_was(enabled: bool) -> None:
    """It is paused while taps are put on, and is then what the script had made it, also after an error."""
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        tt.watch(to=tt.Memory()).close()
        assert gc.isenabled() is enabled
        with pytest.raises(TensortapError):
            tt.watch(torch.nn.ReLU(), "nothing", to=tt.Memory())
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
