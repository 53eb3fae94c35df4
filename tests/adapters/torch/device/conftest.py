"""Tensors reduced as on a device, by PyTorch's own operations."""

import pytest


@pytest.fixture
def device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORTAP_DEVICE_PATH", "torch")
