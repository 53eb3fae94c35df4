"""Frameworks are loaded by whoever uses them, and only theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from subjects import SUBJECTS

from tensortap.adapters import registry

HERE = Path(__file__).resolve().parent / "contract"
FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "flax", "equinox", "haiku", "onnx", "onnxruntime", "sklearn")
# What a framework itself loads; Keras loads JAX and scikit-learn on every backend, where they are installed.
OWN = {
    "torch": {"torch"},
    "numpy": set(),
    "onnx": {"onnx", "onnxruntime"},
    "jax": {"jax", "flax"},
    "keras": {"keras", "tensorflow", "jax", "sklearn"},
}
SCRIPT = """
import json, sys
sys.path.insert(0, {here!r})
import reference, subject_{name}
subject = subject_{name}.Subject()
import tensortap as tt
with subject.watch("fc1", to=tt.Memory()):
    subject.call(reference.batch())
tt.sites(subject.model)
print(json.dumps([name for name in {frameworks!r} if name in sys.modules]))
"""


def loaded(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_tensortap_loads_none():
    """Nor does asking what each framework can show."""
    code = "import json, sys, tensortap\nfrom tensortap.adapters import registry\nregistry.table()\n"
    assert loaded(f"{code}print(json.dumps([name for name in {FRAMEWORKS!r} if name in sys.modules]))") == set()


# Keras loads three frameworks itself, which takes ten seconds, JAX four; import-linter holds adapters to the same.
SELDOM = {"keras": pytest.mark.thorough, "jax": pytest.mark.thorough}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SELDOM.get(name, ())) for name in SUBJECTS if name in OWN])
def test_an_adapter_loads_only_its_own(name):
    """Watching a model of one framework loads no other, whichever are installed."""
    for package in SUBJECTS[name]:
        pytest.importorskip(package)
    assert loaded(SCRIPT.format(here=str(HERE), name=name, frameworks=FRAMEWORKS)) == OWN[name]


def test_every_adapter_keeps_the_contract():
    """There is no adapter without a subject."""
    assert set(registry.BY_NAME) <= set(SUBJECTS)
