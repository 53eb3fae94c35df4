"""Keras on PyTorch and on JAX: the backend is chosen once for a process, so each has its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Keras imports these where they are installed, which takes longer than all the rest, and needs none of them here.
WITHOUT = """
import runpy, sys
sys.modules.update(tensorflow=None, sklearn=None, matplotlib=None, PIL=None, h5py=None)
runpy.run_path(sys.argv.pop(1), {}, "__main__")
"""
LAYERS = ("", "body.0", "body.1", "head")
WEIGHTS = [f"{layer}.{kind}" for layer in LAYERS[1:] for kind in ("kernel", "bias")]


def on(backend, *words):
    pytest.importorskip(backend)
    script = Path(__file__).with_name("on_backend.py")
    env = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", WITHOUT, script, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_training(found, backend):
    assert found["backend"] == backend and found["equal"]
    ports = [f"{layer}:{port}" for layer in LAYERS for port in ("output", "grad_output")]
    ports += [f"{weight}:{port}" for weight in WEIGHTS for port in ("param", "grad")]
    expected = [[step, place] for step in range(3) for place in ports] + [[0, "head:input"], [2, "head:input"]]
    assert found["records"] == sorted(expected)
    assert found["left"] == [] and found["refused"]
    calls = [[f"twice:{port}", call, "bfloat16"] for port in ("grad_output", "output") for call in (0, 1)]
    assert found["half"] == [calls, {}] and found["masked"]


def test_training_on_jax():
    """`fit` with every output, gradient and weight tapped ends with the same weights, and every step is seen."""
    check_training(on("jax"), "jax")


@pytest.mark.thorough  # test_training_on_jax has a backend's own code; what is more is tested on TensorFlow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_backend(backend):
    """Triggers, capturing, predicting, verifying and phases are as on TensorFlow."""
    found = on(backend, "everything")
    check_training(found, backend)
    assert found["unwanted"] == 0 and found["predicted"] and found["verified"]
    assert found["captured"] == {"body.1": [40, 8], "head": [40, 1]}
    assert found["high"][0] == found["high"][1] != []
    assert found["phases"] == ["eval", "eval", "predict", "predict", "train"]
