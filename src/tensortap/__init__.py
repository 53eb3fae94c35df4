"""See every tensor inside a running network, and change nothing.

A name is imported when it is first used, from where `__init__.pyi` says it is made: a program that records loads
nothing of what compares, diagnoses and draws.
"""

import ast
import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any


def _read_stub() -> tuple[dict[str, tuple[str, str]], dict[str, str], list[str]]:
    """Return where each public name is made (module and name there), further names for some, and `__all__`."""
    made: dict[str, tuple[str, str]] = {}
    further: dict[str, str] = {}
    public: list[str] = []
    for line in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body:
        if isinstance(line, ast.ImportFrom):
            made |= {each.asname or each.name: (str(line.module), each.name) for each in line.names}
        elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            if isinstance(line.value, ast.Name):
                further[line.targets[0].id] = line.value.id
            else:
                public = ast.literal_eval(line.value)
    return made, further, public


_MADE, _FURTHER, __all__ = _read_stub()


def __getattr__(name: str) -> Any:
    if name in _FURTHER:
        value = globals()[_FURTHER[name]] if _FURTHER[name] in globals() else __getattr__(_FURTHER[name])
    elif name in _MADE:
        module, there = _MADE[name]
        value = getattr(importlib.import_module(module), there)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MADE, *_FURTHER})


class _Package(ModuleType):
    """A package whose function `tensortap.diff` is not replaced when its subpackage of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _MADE):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
