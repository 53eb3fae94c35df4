"""Doing something once a module has been imported, by whomever, and nothing at all if it never is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, act: Callable[[], None]) -> None:
    """Call `act` when the module `name` has been imported; at once if it is there already."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Once(name, act))


class _Once(MetaPathFinder):
    """Finds nothing itself: it waits for the import and lends the module's loader a method for its duration."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name = name
        self.act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _extend(spec.loader, self)
        return spec


def _extend(loader: Loader, waiting: _Once) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the instance's; the class's own is back
        try:
            run(module)
        except BaseException:
            sys.meta_path.insert(0, waiting)  # it may be tried again
            raise
        waiting.act()

    loader.exec_module = exec_module  # type: ignore[method-assign]
