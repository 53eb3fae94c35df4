"""Rows of a device: one buffer and one copy a step, and what goes wrong with them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.adapters.torch.device.test_device_path import Held, hold, net
from torch import Tensor, nn

import tensortap as tt
from tensortap.adapters.torch.device.devices import DeviceReducer
from tensortap.adapters.torch.device.streams import HostStream
from tensortap.record.recorder import Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.select.probes import as_probes
from tensortap.types import Place


def test_a_step_is_one_copy_from_the_second_on(watch, device_path):
    """The first step may need several buffers; the second has one of the size that was needed."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(150)))
    seen = watch(model)
    stream = Held()
    stream.finished.set()
    hold(seen, stream)
    copies = []
    for _ in range(3):
        stream.copies = 0
        model(torch.randn(4))
        seen.tap.step()
        copies.append(stream.copies)
    assert copies == [3, 1, 1]
    assert len(seen.records) == 453 and all(0 < r["l2"] < 2 for r in seen.records)


def test_a_number_from_a_device_for_a_row_that_is_not_late_is_waited_for():
    """The factor of clipping may be on a device while a gradient is on the host: the row waits for it all the same."""
    recorder = Recorder(as_probes(["x"]))
    stream = Held()
    stream.finished.set()
    devices = DeviceReducer(recorder, lambda device: stream)
    row = recorder.observe(recorder.point(Place("x"), 1), buffer_of(np.ones(3)))
    devices.forced = "torch"
    devices.number(recorder.current, row, "clip", torch.tensor(0.25), 1)
    (step,) = recorder.close()
    assert step.pending and not stream.waiting
    step.wait()
    assert stream.waiting and not step.pending
    assert step.record(row).numbers == {"clip": 0.25} and step.record(row)["mean"] == 1.0


def test_rows_are_found_again_in_parts_of_parts():
    """A table's late rows can be shared out, and shared out again, before any value has come."""
    recorder = Recorder(as_probes(["x"]))
    devices = DeviceReducer(recorder)
    point, table = recorder.point(Place("x"), 1), recorder.current.table
    for i in range(6):
        x = torch.arange(float(i + 1))
        devices.take(point, x, x, recorder.current, 1, False)
    some = table.take(np.array([1, 3, 4, 5]))
    fewer = some.take(np.array([0, 2, 3]))
    for part, want in ((table, range(6)), (some, [1, 3, 4, 5]), (fewer, [1, 4, 5])):
        part.wait()
        assert part.column("max").tolist() == list(want)
        assert [part.histogram(row)[1].sum() for row in range(part.rows)] == list(want)
        assert part.column("finite").all()


def test_threads_share_a_step(watch, device_path, same):
    """Rows of several threads in one step each get their own values."""
    model = nn.Identity()
    seen = watch(model, "values/*")
    tensors = {f"values/{i}": torch.randn(50) + i for i in range(40)}

    def work(names: list[str]) -> None:
        for name in names:
            tt.tap(tensors[name], name)

    threads = [threading.Thread(target=work, args=(list(tensors)[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen.tap.step()
    for name, tensor in tensors.items():
        record = seen.one(f"{name}:output")
        assert (record["min"], record["max"]) == (float(tensor.min()), float(tensor.max()))


# --- what goes wrong ----------------------------------------------------------------------------


def test_a_broken_device_is_counted(watch, device_path):
    """When the values never come, the step is dropped and counted, and training goes on."""
    model = net()
    seen = watch(model)

    class Broken(HostStream):
        def record_event(self) -> Callable[[], None]:
            def fail() -> None:
                raise RuntimeError("unspecified launch failure")

            return fail

    hold(seen, Broken())
    model(torch.randn(5, 3))
    seen.tap.writer.counters.warn = lambda *args: None  # on another thread, where pytest cannot see it
    seen.tap.step()
    seen.tap.flush()
    counts = seen.tap.counts
    assert counts["device_errors"] == 1 and counts["dropped_steps"] == 1 and counts["dropped_records"] == 4


def test_while_a_cuda_graph_is_captured_there_are_no_values(watch, device_path):
    """What a graph replays cannot be read: the row has a shape and no statistics, and that is counted and said."""
    model = net()
    seen = watch(model, "0")

    class Capturing(HostStream):
        capturing = True

    hold(seen, Capturing())
    with pytest.warns(tt.TensortapWarning, match="CUDA graph"):
        model(torch.randn(5, 3))
    seen.tap.step()
    assert seen.one("0:output")["shape"] == (5, 8) and np.isnan(seen.one("0:output")["mean"])
    assert seen.tap.counts["tensors_in_cuda_graphs"] == 1


def test_when_the_kernel_cannot_be_launched_torch_operations_take_over(monkeypatch):
    """A Triton that does not work on this machine is said once; the row is the same."""
    monkeypatch.delenv("TENSORTAP_DEVICE_PATH", raising=False)
    recorder = Recorder(as_probes(["x"]))
    devices = DeviceReducer(recorder)

    def broken(flat: Tensor, words: Tensor, histogram: bool) -> None:
        words.fill_(7)
        raise RuntimeError("Failed to find C compiler")

    devices._reducers["cpu"] = broken
    point = recorder.point(Place("x"), 1)
    x = torch.arange(10.0)
    with pytest.warns(tt.TensortapWarning, match="Triton.*C compiler"):
        devices.take(point, x, x, recorder.current, 1, False)
    devices.take(point, x, x, recorder.current, 1, False)
    (step,) = recorder.close()
    step.table.wait()
    assert [record["mean"] for record in step.records()] == [4.5, 4.5]
    assert recorder.counters.counts() == {"device_errors": 1}


def test_a_full_queue_drops_late_rows_and_counts_them(device_path):
    """With `when_full="drop"`, rows that were not written anywhere yet are counted as lost."""
    model = net()
    memory = tt.Memory()
    tap = tt.watch(model, to=memory, queue_bytes=1, when_full="drop")
    stream = Held()
    tap._adapter._observer.devices._streams = lambda device: stream
    for _ in range(4):
        model(torch.randn(5, 3))
        tap.step()
    stream.finished.set()
    tap.close()
    written = len({record.step for record in memory.records})
    assert tap.counts["dropped_steps"] == 4 - written > 0
    assert tap.counts["dropped_records"] == 4 * (4 - written)
