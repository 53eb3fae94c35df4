"""The frameworks that keep the contract."""

from __future__ import annotations

import importlib

import pytest

# A subject, and what must be importable for it.
SUBJECTS = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "keras": ("keras", "tensorflow"),
    "onnx": ("onnx", "onnxruntime"),
    "jax": ("jax", "flax"),
}


def subject_of(name):
    """A new model of the contract's network, or the test is skipped."""
    for package in SUBJECTS[name]:
        pytest.importorskip(package)
    return importlib.import_module(f"subject_{name}").Subject()
