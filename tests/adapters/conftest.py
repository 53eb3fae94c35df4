"""The contract's subjects: one for every framework that is installed."""

from __future__ import annotations

import importlib

import pytest

pytest.register_assert_rewrite("contract")

# A subject, and what must be importable for it.
SUBJECTS = {"torch": ("torch",), "numpy": ("numpy",), "onnx": ("onnx", "onnxruntime")}


@pytest.fixture(params=SUBJECTS)
def subject(request):
    """A new model of the contract's network."""
    for name in SUBJECTS[request.param]:
        pytest.importorskip(name)
    return importlib.import_module(f"subject_{request.param}").Subject()
