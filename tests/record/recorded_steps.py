"""Give tensors to a recorder, close its steps, and say why each was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tensortap.record.recorder import Recorder
from tensortap.record.step import Step
from tensortap.reduce.buffers import buffer_of
from tensortap.types import Place

ONES = np.ones(4, np.float32)


def see(recorder: Recorder, name: str = "a", value: Any = ONES, probes: int = 1, **more: Any) -> int:
    return recorder.observe(recorder.point(Place(name), probes), buffer_of(value), value, **more)


def play(recorder: Recorder, losses: Iterable[float], probes: int = 1) -> list[Step]:
    """Steps of one tensor each, whose values are the step's number."""
    steps: list[Step] = []
    for loss in losses:
        see(recorder, value=np.full(3, recorder.current.number, np.float32), probes=probes)
        steps += recorder.close({"loss": loss})
    return steps


def kept(steps: list[Step]) -> dict[int, list[str]]:
    return {step.number: [record.reason for record in step.records()] for step in steps if step.table.rows}


def function(result: Any) -> Callable[[Any], Any]:
    def own(x: Any) -> Any:
        return result(x) if callable(result) else result

    return own
