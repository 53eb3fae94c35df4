"""Watch this process as `tensortap run` would, if TENSORTAP names a run; then run the environment's own sitecustomize.

Python imports this file at its start because its folder is on PYTHONPATH. Nothing of tensortap is imported before the
process imports PyTorch, Keras or JAX.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def _load(spec: importlib.machinery.ModuleSpec | None) -> ModuleType | None:
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _begin() -> None:
    from tensortap.script.session import watch_this_process

    watch_this_process()


def _watch() -> None:
    here = Path(__file__).resolve()
    imports = _load(importlib.util.spec_from_file_location("_tensortap_imports", here.parent.parent / "imports.py"))
    if imports is not None:
        for framework in ("torch", "keras", "jax"):
            imports.after_import(framework, _begin)


def _run_other() -> None:
    here = str(Path(__file__).resolve().parent)
    elsewhere = [folder for folder in sys.path if str(Path(folder or ".").resolve()) != here]
    _load(importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere))


if __name__ == "sitecustomize":  # imported by any other name, it is only looked at
    if os.environ.get("TENSORTAP"):
        _watch()
    _run_other()
