"""The recorder and the user's functions and triggers: what they may return, and that what they raise hurts nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from recorded_steps import ONES, function, play, see

from tensortap.record.counters import Counters, TensortapWarning
from tensortap.record.recorder import Recorder
from tensortap.reduce.reducers import full, rows
from tensortap.select.probes import probe
from tensortap.select.triggers import Answer, Trigger, every
from tensortap.types import StepOutcome


@pytest.mark.parametrize(
    ("result", "numbers", "tensors"),
    [
        (3, {"own": 3.0}, []),
        (np.float32(0.5), {"own": 0.5}, []),
        (True, {"own": 1.0}, []),
        ({"a": 1, "b": np.float64(2.5)}, {"own.a": 1.0, "own.b": 2.5}, []),
        ([1.0, 2.0], {}, [[1.0, 2.0]]),
        (np.arange(4096), {}, [list(range(4096))]),
        (lambda x: x[:2], {}, [[1.0, 1.0]]),
        (None, {}, []),
    ],
    ids=["int", "scalar", "bool", "dict", "list", "largest array", "view", "nothing"],
)
def test_what_a_function_may_return(result: Any, numbers: dict[str, float], tensors: list[Any]) -> None:
    """A number, a dict of numbers or a small array is kept under the function's name, as a copy."""
    recorder = Recorder([probe("a", keep=function(result))])
    value = ONES.copy()
    see(recorder, value=value)
    value[:] = 99
    [step] = recorder.close()
    assert next(step.records()).numbers == numbers
    assert [k.array.tolist() for k in step.table.tensors] == tensors
    assert all(k.kind == "own" for k in step.table.tensors) and recorder.counters.counts() == {}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda x: 1 / 0, "ZeroDivisionError"),
        (np.zeros(4097), "4097 elements"),
        ("text", "cannot"),
        ({"a": "x"}, "could not convert"),
        (1 + 2j, "complex"),
    ],
    ids=["raises", "too large", "text", "dict of text", "complex"],
)
def test_a_function_that_fails_is_counted_and_named(result: Any, text: str) -> None:
    """An error in a user's function is counted, named once with its site, and hurts nothing else."""
    recorder = Recorder([probe("a", keep=[function(result), full(), lambda x: 7.0])])
    with pytest.warns(TensortapWarning, match=r"own\(\) at a:output failed.*your code goes on") as caught:
        steps = play(recorder, [0, 0, 0])
    assert len(caught) == 1 and text in str(caught[0].message)
    assert recorder.counters.counts() == {"reducer_errors": 3}
    for step in steps:
        assert dict(next(step.records()).numbers) == {"<lambda>": 7.0}
        assert [k.kind for k in step.table.tensors] == ["full"]


def test_rows_that_a_tensor_lacks_are_counted() -> None:
    """A tensor without any of the chosen rows keeps none, which is counted, and the other reducers keep theirs."""
    recorder = Recorder([probe("a", keep=[rows([0]), full()])])
    see(recorder, value=np.float32(1.0))  # no rows in a scalar
    [step] = recorder.close()
    assert [k.kind for k in step.table.tensors] == ["full"] and recorder.counters.counts() == {"rows_absent": 1}


def test_strict_lets_errors_out() -> None:
    """With `strict` a function's error is raised where it happened."""
    recorder = Recorder([probe("a", keep=function(lambda x: 1 / 0))], counters=Counters(strict=True))
    with pytest.warns(TensortapWarning), pytest.raises(ZeroDivisionError):
        see(recorder)


class Broken(Trigger):
    def __init__(self, half: str) -> None:
        self.half = half

    def before(self, step: int) -> Answer:
        if self.half == "before":
            raise RuntimeError("no idea")
        return Answer.MAYBE

    def after(self, step: int, seen: StepOutcome) -> str | None:
        if self.half == "after":
            raise RuntimeError("no idea")
        return "broken"


@pytest.mark.parametrize("half", ["before", "after"])
def test_a_trigger_that_fails_hurts_no_other(half: str) -> None:
    """An error in a trigger is counted and warned of once; the other probes go on."""
    with pytest.warns(TensortapWarning, match="no idea") as caught:
        recorder = Recorder([probe("a", when=Broken(half)), probe("a", when=every(1))])
        steps = play(recorder, [0, 0], probes=3)
    assert len(caught) == 1 and recorder.counters.counts()["trigger_errors"] >= 2
    assert [step.table.rows for step in steps] == [1, 1]
