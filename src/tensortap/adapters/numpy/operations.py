"""Single operations inside NumPy-style layers, where patterns ask for them: `op:matmul`, `fc/einsum`, `op:@matmul`.

Opt-in, because the layers are then given traced arrays (see traced.py) in place of plain ones; what they return, and
what they have put into attributes, is plain again when the outermost call ends.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from tensortap.adapters.numpy.traced import LAYER_CALLS, strip, wrap
from tensortap.adapters.operations import Groups, OperationTaps, operation_patterns
from tensortap.adapters.plan import Plan
from tensortap.select.sites import Pattern

MISSED: Final = (
    "no such operation was seen; those among arrays that passed np.asarray, or that do not come from what the layer "
    "was given, are missed"
)
GROUPS: Final[Groups] = {
    "matmul": frozenset(
        ("matmul", "dot", "vdot", "inner", "outer", "einsum", "tensordot", "matvec", "vecmat", "vecdot")
    )
}
# The names of NumPy's functions, to tell an operation of a layer from a value that the user names later.
KNOWN: Final = frozenset(
    name for name, value in vars(np).items() if callable(value) and not isinstance(value, type) and name[0] != "_"
)


class NumpyOperations(OperationTaps):
    """All NumPy operations of one tap."""

    groups = GROUPS
    missed = MISSED


class NumpyOperationHook:
    """Pass traced arrays to a layer. An operation belongs to the innermost running layer."""

    def __init__(self, taps: NumpyOperations, path: str, owner: Any) -> None:
        self.taps = taps
        self.path = path
        self._owner = weakref.ref(owner) if hasattr(owner, "__weakref__") else lambda: owner

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the layer's function, called with traced arrays while a probe may want the step."""
        return partial(self._run, function) if self.taps.steps.current().armed & self.taps.bits else function

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stacks, key = LAYER_CALLS.stacks, id(self.taps)
        outermost = not stacks
        stacks.setdefault(key, []).append(_NumberedCall(self.taps, self.path))
        try:
            output = function(*wrap(args), **wrap(kwargs))
            return strip(output) if outermost else output
        finally:
            stacks[key].pop()
            if not stacks[key]:
                del stacks[key]
            strip_attributes(self._owner())

    def begin(self) -> None:
        """Do nothing."""

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Do nothing."""

    def after(self, output: Any) -> None:
        """Do nothing."""

    def ended(self) -> None:
        """Do nothing."""


class _NumberedCall:
    """One call of a layer: numbers its operations, each kind by itself."""

    def __init__(self, taps: NumpyOperations, path: str) -> None:
        self._taps = taps
        self._path = path
        self._count: Counter[str] = Counter()

    def observe(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Run an operation and record it."""
        number = self._count[name]
        self._count[name] += 1
        return self._taps.observe(self._path, number, name, args, kwargs, run)


def wanted_patterns(plan: Plan, paths: Iterable[str]) -> list[Pattern]:
    """Return the patterns that mean operations of NumPy."""
    return operation_patterns(plan, paths, KNOWN, GROUPS)


def strip_attributes(owner: Any) -> None:
    """Replace traced arrays that a layer has stored by plain ones; its lists and dicts stay the same objects."""
    own = getattr(owner, "__dict__", {})
    for name, value in list(own.items()):
        plain = strip(value)
        if plain is value:
            continue
        if isinstance(value, list):
            value[:] = plain
        elif isinstance(value, dict):
            value.update(plain)
        else:
            own[name] = plain
