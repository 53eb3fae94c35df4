"""See every tensor inside a running network, and change nothing.

A name is imported when it is first used, from where `__init__.pyi` says it is made: a program that records loads
nothing of what compares, diagnoses and draws. Importing the package imports none of its modules, and no framework.
"""

import ast
import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any


def _read_stub() -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return where each public name is made, a module and the name there, and `__all__`."""
    made: dict[str, tuple[str, str]] = {}
    public: list[str] = []
    for line in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body:
        if isinstance(line, ast.ImportFrom):
            made |= {each.asname or each.name: (str(line.module), each.name) for each in line.names}
        elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            if isinstance(line.value, ast.Name):  # another name of the same
                made[line.targets[0].id] = made[line.value.id]
            else:
                public = ast.literal_eval(line.value)
    return made, public


_MADE, __all__ = _read_stub()


def __getattr__(name: str) -> Any:
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module, there = _MADE[name]
    value = globals()[name] = getattr(importlib.import_module(module), there)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MADE})


class _Package(ModuleType):
    """A package whose function `tensortap.diff` is not replaced when its subpackage of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _MADE):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
