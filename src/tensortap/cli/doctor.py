"""What is installed and active, what each framework can show, what is missing. No framework is imported for it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from importlib import metadata
from typing import Any, Final, NamedTuple

from tensortap.adapters import capabilities
from tensortap.reduce import kernel as kernels

BASE: Final = ("numpy", "pyarrow", "ml_dtypes", "safetensors", "fsspec", "rich", "click")
FRAMEWORKS: Final = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "keras": ("keras",),
    "jax": ("jax",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "sklearn": ("scikit-learn",),
}
# Package: what it is for, and how to get it.
EXTRAS: Final = {
    "duckdb": ("run.sql(…)", "pip install 'tensortap[query]'"),
    "onnx": ("watching ONNX Runtime sessions", "pip install 'tensortap[onnx]'"),
    "starlette": ("tensortap view", "pip install 'tensortap[view]'"),
    "uvicorn": ("tensortap view", "pip install 'tensortap[view]'"),
    "s3fs": ("runs at s3://…", "pip install s3fs"),
    "tensorboard": ("TensorBoard(…)", "pip install 'tensortap[tensorboard]'"),
}
_REBUILD: Final = "install a C compiler (e.g. apt install gcc), then: pip install --force-reinstall --no-deps tensortap"


class Check(NamedTuple):
    """One thing looked at: `advice` is empty when nothing need be done."""

    group: str
    name: str
    found: str
    advice: str = ""


def checks() -> list[Check]:
    """Everything there is to say, in groups."""
    return [*_kernel(), *_versions(), *_frameworks(), *_extras()]


def as_json(found: list[Check]) -> dict[str, Any]:
    """The same as plain values: name to what was found (null when missing), what frameworks show, what to do."""
    groups: dict[str, dict[str, str | None]] = {}
    for check in found:
        groups.setdefault(check.group, {})[check.name] = check.found or None
    given = {c.name: {f: c.lacks.get(f, True) for f in capabilities.FEATURES} for c in capabilities.table()}
    return {**groups, "capabilities": given, "advice": {check.name: check.advice for check in found if check.advice}}


def _kernel() -> list[Check]:
    slow = kernels.ACTIVE == "numpy"
    return [
        Check("kernel", "active", kernels.ACTIVE, f"the same results, but slower; {_REBUILD}" * slow),
        Check("kernel", "threads", f"{_threads()} of {os.cpu_count()} CPUs"),
    ]


def _threads() -> int:
    name = "fallback" if kernels.ACTIVE == "numpy" else "_kernel"
    return int(importlib.import_module(f"tensortap.reduce.{name}").threads())


def _versions() -> list[Check]:
    python = Check("versions", "python", f"{platform.python_version()} ({platform.platform()})")
    ours = Check("versions", "tensortap", version("tensortap") or "not installed (run from its source)")
    return [ours, python, *(_package("versions", name, (name,), f"pip install {name}") for name in BASE)]


def _frameworks() -> list[Check]:
    return [_package("frameworks", name, packages, "") for name, packages in FRAMEWORKS.items()]


def _extras() -> list[Check]:
    return [_package("extras", name, (name,), f"needed for {use}: {how}") for name, (use, how) in EXTRAS.items()]


def _package(group: str, name: str, packages: tuple[str, ...], advice: str) -> Check:
    found = next(filter(None, map(version, packages)), "") or ("version unknown" if _importable(name) else "")
    return Check(group, name, found, "" if found else advice)


def version(package: str) -> str:
    """An installed package's version; empty when there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
