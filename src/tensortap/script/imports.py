"""Call a function once a module has been imported by any code; never if it is not imported."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, act: Callable[[], None]) -> None:
    """Call `act` when the module `name` has been executed; at once if that has happened already."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _ImportWatch(name, act))


class _ImportWatch(MetaPathFinder):
    """Return the spec of the other finders, with a loader that tells when the module was executed.

    It stays in place until then: `importlib.util.find_spec("torch")`, which many libraries call to learn whether
    PyTorch is installed, finds the module and does not execute it.
    """

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name = name
        self.act = act
        self._local = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders give."""
        if fullname != self.name or getattr(self._local, "busy", False):
            return None
        self._local.busy = True  # the other finders are called through the same list
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._local.busy = False
        if spec is not None and spec.loader is not None and "exec_module" not in vars(spec.loader):
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Loader) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the instance's; the class's own is back
            run(module)  # when it raises the watch stays, for the import may be tried again
            self._executed()

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _executed(self) -> None:
        act, self.act = self.act, lambda: None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        act()
