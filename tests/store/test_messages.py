"""Messages that C makes of a step table are those that Arrow would make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tensortap.record.recorder import Recorder
from tensortap.record.step import Step
from tensortap.reduce import kernel as kernels
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import histogram, stats
from tensortap.select.probes import probe
from tensortap.store import messages
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.store.schema import Batches, MetricBatches
from tensortap.types import Place

VALUES = [[1.0, 2.0], [np.nan], [], [[0.0, -1.0, 3.0], [4.0, np.inf, 5.0]], 7.0]
pytestmark = pytest.mark.skipif(kernels.append_rows is None, reason="there is no C kernel")


def steps(counts: list[int], keep: Any) -> list[Step]:
    recorder = Recorder([probe("**", keep=keep)], clock=lambda: 1e9)
    closed = []
    for count in counts:
        for i in range(count):
            x = np.array(VALUES[i % len(VALUES)], np.float32)
            recorder.observe(recorder.point(Place(f"layer.{i}"), 1), buffer_of(x))
        closed += recorder.close()
    return closed


def stream(first: Any, *rest: bytes) -> list[Any]:
    """Read a stream that Arrow has begun and messages go on with."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, first.schema) as writer:
        writer.write_batch(first)
    begun = sink.getvalue().to_pybytes()[:-8]  # without its end
    found = list(pa.ipc.open_stream(b"".join([begun, *rest])))
    for batch in found:
        batch.validate(full=True)
    return found


@pytest.mark.parametrize("keep", [stats(), [stats(), histogram()]], ids=["stats", "histogram"])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 300])
def test_a_message_holds_the_rows_of_the_batch(keep: Any, rows: int) -> None:
    """Tensors with and without elements, finite values, axes and histograms, in tables that have grown."""
    [step] = steps([rows], keep)
    batches = Batches(step.names)
    message = batches.message(step)
    assert message is not None
    expected, got = stream(batches.of(step), bytes(message))
    assert got.equals(expected) and got.num_rows == rows


def test_metrics_come_as_messages_too() -> None:
    """Numbers of later steps are filled into the message of the first."""
    metrics = MetricBatches()
    first = metrics.of(1, 2, {"loss": 0.5, "acc": 1.0}, "train", "net")
    message = bytes(metrics.message(7, 8, {"loss": -2.5, "acc": np.nan}, "train", "net"))
    expected = metrics.of(7, 8, {"loss": -2.5, "acc": np.nan}, "train", "net")
    assert str(stream(first, message)[1].to_pylist()) == str(expected.to_pylist())


@pytest.mark.parametrize("way", ["c", "arrow"])
def test_runs_are_the_same_either_way(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New sites and metrics in later steps are words that Arrow adds; the rows are the same, live and sealed."""
    if way == "arrow":
        monkeypatch.setattr(messages.kernels, "append_rows", None)
    recorder = Recorder([probe("**", keep=stats())], clock=lambda: 1e9)
    folder = RunFolder(tmp_path / "run")
    for number in range(6):
        for i in range(2 + number // 2):
            x = np.arange(3.0) + number
            recorder.observe(recorder.point(Place(f"layer.{i}"), 1), buffer_of(x))
        metrics = {"loss": 1.0 * number} | ({"late": 2.0} if number > 3 else {})
        for step in recorder.close(metrics):
            folder.append(step)
    folder.tick()
    rows = [(number, f"layer.{i}", number + 1.0) for number in range(6) for i in range(2 + number // 2)]
    for _ in range(2):
        run = open_run(tmp_path / "run")
        assert list(zip(*(run.table()[name].to_pylist() for name in ("step", "site", "mean")), strict=True)) == rows
        assert run.metrics()["value"].to_pylist() == [0, 1, 2, 3, 4, 2, 5, 2] and run.counts == {}
        folder.close()
