"""Tensors whose step another thread closes while they are being read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tensortap.adapters.torch.modules.tensors import DeviceObserver, TensorObserver
from tensortap.record.recorder import Recorder
from tensortap.select.probes import probe
from tensortap.types import Place

X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("tensor", "observer"),
    [
        pytest.param(X, TensorObserver, id="contiguous"),
        pytest.param(X.t(), TensorObserver, id="strided"),
        pytest.param(X.to("meta"), TensorObserver, id="without values"),
        pytest.param(X, DeviceObserver, id="device"),
        pytest.param(torch.zeros(0), DeviceObserver, id="empty on a device"),
    ],
)
def test_a_tensor_whose_step_was_closed_meanwhile_is_counted(
    tensor: Tensor, observer: type[TensorObserver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way of reading a tensor counts it in `late_records` when its step takes no more rows."""
    if observer is DeviceObserver:
        monkeypatch.setenv("TENSORTAP_DEVICE_PATH", "torch")
    recorder = Recorder([probe("**")])
    step = recorder.current
    step.table.close()

    assert observer(recorder).take(recorder.point(Place("a"), 1), tensor, step) == -1
    assert recorder.counters.counts()["late_records"] == 1 and step.table.rows == 0
