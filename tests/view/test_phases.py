"""Training and evaluation apart: what the page is told of each phase is what the records of that phase say."""

import numpy as np
import pytest

from tensortap.record.recorder import Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.select.probes import probe
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.types import Place
from tensortap.view.api.query import RequestError
from tensortap.view.api.service import Api

PHASES = ["eval", *["train"] * 6, "eval", "eval", *["train"] * 6, "eval"]


def record(path, *, own_numbers, close=True):
    """Steps of both phases; the value is the step's place in `PHASES`, and evaluation's are negative."""
    folder, recorder = RunFolder(path), Recorder([probe("**")])
    for n, phase in enumerate(PHASES):
        if own_numbers:
            recorder.enter_phase(phase)
        value = np.full(4, n if phase == "train" else -n, np.float32)
        recorder.observe(recorder.point(Place("fc"), 1), buffer_of(value))
        told = {"loss": float(n)} | ({"accuracy": 0.5} if phase == "eval" else {})
        folder.append(recorder.close(told, phase=phase)[0])
    if close:
        folder.close()
    return folder


def values(phase):
    return [float(n if phase == "train" else -n) for n, of in enumerate(PHASES) if of == phase]


@pytest.mark.parametrize("own_numbers", [False, True])
@pytest.mark.parametrize("state", ["tail", "sealed", "compacted"])
def test_a_phase_has_its_own_steps_and_values(tmp_path, own_numbers, state):
    """Heat map, site and depth hold one phase's steps and no others, however steps are numbered and stored."""
    folder = record(tmp_path / "run", own_numbers=own_numbers, close=state != "tail")
    if state == "compacted":
        compact(tmp_path / "run")
    api = Api(str(tmp_path / "run"))
    for phase in ("train", "eval"):
        rows = open_run(tmp_path / "run").table(columns=["step"], phase=phase)["step"].to_pylist()
        heat = api.answer("/api/heat", {"stat": "mean", "phase": phase}).columns
        assert heat["value"].tolist() == [values(phase)]
        assert heat["step"].tolist()[:-1] == sorted(rows)
        site = api.answer("/api/site", {"site": "fc:output", "phase": phase}).columns
        assert site["mean"].tolist() == values(phase) and site["step"].tolist() == sorted(rows)
        depth = api.answer("/api/depth", {"phase": phase}).columns
        assert depth["step"].tolist() == sorted(rows)
        info = api.answer("/api/run", {"phase": phase})
        assert info["steps"] == {"count": len(rows), "first": min(rows), "last": max(rows)}
        assert info["phase"] == phase and info["phases"] == ["eval", "train"]
    api.close()
    folder.close()


def test_training_is_shown_unless_another_phase_is_asked_for(tmp_path):
    """Without `phase` evaluation leaves no gaps and no spikes in training; `all` shows every record."""
    record(tmp_path / "run", own_numbers=False)
    api = Api(str(tmp_path / "run"))
    assert api.answer("/api/heat", {"stat": "mean"}).columns["value"].tolist() == [values("train")]
    assert api.answer("/api/run", {})["phase"] == "train"
    assert api.answer("/api/heat", {"stat": "mean", "phase": "all"}).columns["value"].shape == (1, len(PHASES))
    assert api.answer("/api/run", {})["counts"] == {}
    with pytest.raises(RequestError, match="phase must be one of eval, train, all, got 'test'"):
        api.answer("/api/heat", {"phase": "test"})
    api.close()


def test_a_run_of_one_phase_is_shown_whole(tmp_path):
    """Where there is one phase nothing is chosen, and nothing is read to find that out."""
    folder, recorder = RunFolder(tmp_path / "run"), Recorder([probe("**")])
    recorder.observe(recorder.point(Place("fc"), 1), buffer_of(np.ones(2, np.float32)))
    folder.append(recorder.close({}, phase="eval")[0])
    folder.close()
    api = Api(str(tmp_path / "run"))
    info = api.answer("/api/run", {})
    assert (info["phase"], info["phases"], info["steps"]["count"]) == ("", ["eval"], 1)
    api.close()


@pytest.mark.parametrize("own_numbers", [False, True])
def test_metrics_are_those_of_the_phase(tmp_path, own_numbers):
    """A loss of both phases is training's; what only evaluation has stays where steps share one sequence of numbers."""
    record(tmp_path / "run", own_numbers=own_numbers)
    api = Api(str(tmp_path / "run"))
    for phase in ("train", "eval"):
        answer = api.answer("/api/metrics", {"phase": phase})
        loss = answer.columns[f"m{answer.header['names'].index('loss')}.mean"]
        assert loss[~np.isnan(loss)].tolist() == [abs(value) for value in values(phase)]
        assert ("accuracy" in answer.header["names"]) == (phase == "eval" or not own_numbers)
    api.close()
