"""Runs whose phases number their own steps: a training step is compared with a training step, whatever else ran."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tensortap as tt
from tensortap.cli.app import cli
from tensortap.diff.runs import Side
from tensortap.record.recorder import Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.types import Place
from tensortap.view.api.diff import difference
from tensortap.view.api.query import Query

MakeRun = Callable[..., str]
TRAIN, BOTH, MORE = "ttt" * 2, "ttte" * 2, "tttee" * 2
PHASES = {"t": "train", "e": "eval"}


@pytest.fixture
def run(tmp_path: Path) -> MakeRun:
    """A function that records steps, a letter each, every phase with numbers of its own, and gives the run's path."""
    count = itertools.count()

    def make(steps: str, *, wrong: tuple[str, int] | None = None, compacted: bool = False, keep: Any = None) -> str:
        path, clock = tmp_path / f"run{next(count)}", itertools.count(1_000_000)
        recorder = Recorder([tt.probe("**", keep=keep)], clock=lambda: float(next(clock)))
        recorder.number_by_phase()
        folder, seen = RunFolder(path, launch="test"), {"t": 0, "e": 0}
        for letter in steps:
            recorder.enter_phase(PHASES[letter])
            off = wrong == (letter, seen[letter])
            for i, name in enumerate(("w", "x")):
                port = "param" if name == "w" else "output"
                array = np.full((4, 3), 1.0 + seen["t"] + 10 * (letter == "e") + i, np.float32) * (1 + off)
                recorder.observe(recorder.point(Place(name, port), 1), buffer_of(array), array)
            seen[letter] += 1
            for step in recorder.close({}, phase=PHASES[letter]):
                folder.append(step)
        folder.tick()
        folder.close()
        if compacted:
            compact(path)
        return str(path)

    return make


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize(("a", "b", "said"), [(TRAIN, BOTH, "only in b: the phase eval, 2 steps"),
                                              (BOTH, TRAIN, "only in a: the phase eval, 2 steps"),
                                              (BOTH, MORE, "only in b: 2 steps: 1 (eval), 3 (eval)")])  # fmt: skip
def test_one_evaluates_more(run: MakeRun, a: str, b: str, said: str, compacted: bool) -> None:
    """Trainings that are the same stay the same when one evaluates, or more often; what is more is counted."""
    found = tt.diff(run(a, compacted=compacted), run(b))
    assert found and found.first_unequal is None
    assert said in list(found.remarks())
    assert len(found.steps) == (6 if TRAIN in (a, b) else 8) and found.pairs == 2 * len(found.steps)


@pytest.mark.parametrize("keep", [None, [tt.stats(), tt.full()]])
@pytest.mark.parametrize("compacted", [False, True])
def test_pairs_are_of_one_phase(run: MakeRun, compacted: bool, keep: Any) -> None:
    """Every pair is of one phase and step, in columns as one by one, and what was kept is looked up in its phase."""
    found = tt.diff(run(BOTH, keep=keep), run(MORE, keep=keep, compacted=compacted))
    rows = found.table()
    steps = [(phase, step) for phase, step in zip(*(rows[n].to_pylist() for n in ("phase", "step")), strict=True)]
    in_order = [("train", 0), ("train", 1), ("train", 2), ("eval", 0), ("train", 3), ("train", 4), ("train", 5)]
    assert list(dict.fromkeys(steps)) == [*in_order, ("eval", 1)]
    assert rows["excess"].to_pylist() == found.excess.excess.tolist() == [0.0] * len(rows)
    assert set(rows["kept"].to_pylist()) == {"full" if keep else ""}


@pytest.mark.parametrize(
    ("wrong", "said"), [(("e", 1), "w:param at step 1 (eval)"), (("t", 4), "w:param at step 4 (train)")]
)
def test_first_is_named_with_its_phase(run: MakeRun, wrong: tuple[str, int], said: str) -> None:
    """Where phases number their own steps, the first divergence says of which one it is; time tells which is first."""
    found = tt.diff(run(BOTH), run(BOTH, wrong=wrong))
    assert not found and said in found.headline
    assert found.cause is not None and found.cause.phase == PHASES[wrong[0]]


def test_later_evaluation_is_not_first(run: MakeRun) -> None:
    """An evaluation with a low number that ran late is not before the training step that went wrong."""
    found = tt.diff(run("tttte", wrong=None), run("tttte", wrong=("t", 3)))
    assert found.first is not None and (found.first.phase, found.first.step) == ("train", 3)
    late = tt.diff(run("tttte"), run("tttte", wrong=("e", 0)))
    assert late.explanation == ""  # training began with the same parameters, though the evaluation is step 0


def test_chosen_steps(run: MakeRun) -> None:
    """A step that is chosen by number is that of each phase both have."""
    found = tt.diff(run(BOTH), run(BOTH), steps=1)
    assert found and found.steps == (1, 1) and found.pairs == 4
    found = tt.diff(run(TRAIN), run(BOTH), steps=1)
    assert found and found.steps == (1,) and found.steps_only_in_b == (1,)


def test_chosen_evaluations(run: MakeRun) -> None:
    """Evaluations are paired by the training before them also where no training step is chosen."""
    found = tt.diff(run("teee" * 2), run("tee" * 2), steps=slice(2, 6))
    assert found and [(x.step, y.step) for x, y in found.paired.both] == [(3, 2), (4, 3)]


def test_viewer(run: MakeRun) -> None:
    """The heat map of the viewer has a column for each number, and its cells are the worst of the phases."""
    sides = [Side(r, r.snapshots.take()) for r in map(tt.open, (run(BOTH), run(MORE, wrong=("e", 2))))]
    answer = difference(*sides, Query({}))
    heat = answer["heat"]
    assert heat["steps"] == [0, 1, 2, 3, 4, 5]
    worst = [[value is not None and value > 0 for value in row] for row in heat["value"]]
    assert worst == [[False, True, False, False, False, False]] * 2


def test_check_counts_both_phases(run: MakeRun) -> None:
    """`tensortap check` counts the steps of both phases, as the script's own summary does."""
    said = CliRunner().invoke(cli, ["check", run(MORE)]).output
    assert "10 steps (6 train, 4 eval)" in said


def test_by_record(run: MakeRun) -> None:
    """Another layout, which is compared step by step, keeps phases apart as well."""
    found = tt.diff(run(TRAIN), run(BOTH), map=lambda name: name)
    assert found and found.pairs == 12


def test_evaluations_after_the_same_training(run: MakeRun) -> None:
    """Of runs that evaluate at other intervals, evaluations after as many training steps are compared."""
    found = tt.diff(run("tttetttettte"), run("tttttte" + "ttte"))
    steps = [(x.step, y.step) for x, y in found.paired.both if x.phase == "eval"]
    assert steps == [(1, 0), (2, 1)] and found.moved == (1, 0)
    assert "such as step 1 (eval) of a with step 0 (eval) of b" in found.paired.moved
