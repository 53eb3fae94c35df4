"""The import of PyTorch is noticed whatever happened before it."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tensortap.script.imports import after_import

BODY = """
import torch
model = torch.nn.Linear(4, 2)
model(torch.randn(3, 4))
"""
BEFORE = {
    "find_spec": "import importlib.util\nassert importlib.util.find_spec('torch')\n",
    "find_spec twice": "import importlib.util\nfor _ in range(2): assert importlib.util.find_spec('torch')\n",
    "metadata": "import importlib.metadata\nimportlib.metadata.version('torch')\n",
    "a library that asks first": "from transformers import BertConfig\n",
    "a failed import": "import sys\nsys.modules['torch'] = None\ntry:\n    import torch\nexcept ImportError:\n"
    "    del sys.modules['torch']\n",
}


@pytest.mark.parametrize(
    "before",
    [pytest.param(each, marks=pytest.mark.thorough if "library" in each else ()) for each in BEFORE],
)
def test_a_script_is_observed_whatever_asked_for_torch_before(scripts, before):
    """Code that asks whether torch is there, without importing it, hides no model."""
    done, run = scripts.observe(BEFORE[before] + BODY, process=before == "a library that asks first")
    assert done.returncode == 0, done.stderr
    assert run is not None and len(run.table()) > 0, done.stderr


def test_the_watch_stays_until_the_module_is_executed(tmp_path, monkeypatch):
    """Asking for the spec calls nothing; importing calls once; what is left is as before."""
    (tmp_path / "some_module_of_mine.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    finders, calls = list(sys.meta_path), []
    after_import("some_module_of_mine", lambda: calls.append(sys.modules["some_module_of_mine"].x))
    for _ in range(2):
        assert importlib.util.find_spec("some_module_of_mine").origin.endswith("some_module_of_mine.py")
    assert calls == []
    importlib.import_module("some_module_of_mine")
    assert calls == [1] and sys.meta_path == finders
    assert isinstance(sys.modules.pop("some_module_of_mine"), ModuleType)


def test_an_import_that_failed_may_be_tried_again(tmp_path, monkeypatch):
    """The watch stays when the module raises, and tells when it does not."""
    module = tmp_path / "another_module_of_mine.py"
    module.write_text("raise OSError('not yet')")
    monkeypatch.syspath_prepend(tmp_path)
    calls = []
    after_import("another_module_of_mine", lambda: calls.append(1))
    with pytest.raises(OSError, match="not yet"):
        importlib.import_module("another_module_of_mine")
    module.write_text("ready = True  # longer than before, so that it is compiled again")
    importlib.invalidate_caches()
    importlib.import_module("another_module_of_mine")
    assert calls == [1]
    del sys.modules["another_module_of_mine"]
