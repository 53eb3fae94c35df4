"""Single operations inside layers, where patterns ask for them: `op:matmul`, `fc/einsum`, `op:@matmul`.

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

from tensortap.adapters.arrays import NO_ARRAY_IN, NO_ARRAY_OUT, ArrayObserver, Arrays, arrays_in, as_array
from tensortap.adapters.nested import values_in
from tensortap.adapters.numpy.traced import SCOPES, strip, wrap
from tensortap.adapters.protocol import Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.select.ports import FORWARD_PORTS
from tensortap.select.sites import Pattern

MISSED: Final = (
    "no such operation was seen; those among arrays that passed np.asarray, or that do not come from what the layer "
    "was given, are missed"
)
Groups = Mapping[str, frozenset[str]]
GROUPS: Final[Groups] = {
    "matmul": frozenset(
        ("matmul", "dot", "vdot", "inner", "outer", "einsum", "tensordot", "matvec", "vecmat", "vecdot")
    )
}
# What NumPy's functions are called, to tell an operation of a layer from a value that is still to be named.
KNOWN: Final = frozenset(
    name for name, value in vars(np).items() if callable(value) and not isinstance(value, type) and name[0] != "_"
)


class OpTaps:
    """All operations of one tap. Ports are decided when an operation is first met."""

    groups: Groups = GROUPS
    missed = MISSED

    def __init__(self, observer: ArrayObserver, steps: CallStepDetector, plan: Plan, patterns: list[Pattern]) -> None:
        self.observer = observer
        self.steps = steps
        self._plan = plan
        self._patterns = patterns
        self._ports: dict[tuple[str, str, int, str], Port | None] = {}
        self.bits = 0
        for i, probe in enumerate(plan.probes):
            self.bits |= any(pattern in patterns for pattern in probe.patterns) << i

    def see(self, path: str, number: int, name: str, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run an operation, and record what it is given and what it gives."""
        given, gives = (self.port(path, name, number, port) for port in ("input", "output"))
        step = self.steps.current()
        if given is not None and step.armed & given.bits:
            self._take(given, _given(args, kwargs), NO_ARRAY_IN)
        output = run()
        if gives is not None and step.armed & gives.bits:
            self._take(gives, arrays_in(output), NO_ARRAY_OUT)
        return output

    def unseen(self) -> dict[str, str]:
        """Patterns for operations, each with why none was met; empty for those that met one."""
        met = {
            pattern for port in self._ports.values() if port is not None and port.seen for pattern, _ in port.patterns
        }
        return {pattern.text: "" if pattern in met else self.missed for pattern in self._patterns}

    def _take(self, port: Port, found: list[tuple[str, Any]], why: str) -> None:
        try:
            self.observer.take_all([port], found, self.steps.current(), why)
        except Exception as error:
            self.observer.recorder.counters.failed("skipped_tensors", f"observing {port.path}", error)

    def port(self, path: str, op: str, number: int, port: str) -> Port | None:
        """The port of an operation, if any probe wants it."""
        key = (path, op, number, port)
        if key not in self._ports:
            chosen = [
                (pattern, 1 << i)
                for i, probe in enumerate(self._plan.probes)
                for pattern in probe.patterns
                if pattern in self._patterns and pattern.matches_op(path, op, number, port, self.groups)
            ]
            self._ports[key] = (
                Port(self.observer.recorder, f"{path}/{op}#{number}", port, chosen, op) if chosen else None
            )
        return self._ports[key]


class OpHook:
    """Gives a layer traced arrays. The innermost layer that runs is the one an operation belongs to."""

    def __init__(self, taps: OpTaps, path: str, owner: Any) -> None:
        self.taps = taps
        self.path = path
        self._owner = weakref.ref(owner) if hasattr(owner, "__weakref__") else lambda: owner

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The layer's function, called with traced arrays while a probe may want the step."""
        return partial(self._run, function) if self.taps.steps.current().armed & self.taps.bits else function

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stacks, key = SCOPES.stacks, id(self.taps)
        outermost = not stacks
        stacks.setdefault(key, []).append(_Call(self.taps, self.path))
        try:
            output = function(*wrap(args), **wrap(kwargs))
            return strip(output) if outermost else output
        finally:
            stacks[key].pop()
            if not stacks[key]:
                del stacks[key]
            clean(self._owner())

    def begin(self) -> None:
        """Nothing to do."""

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Nothing to do."""

    def after(self, output: Any) -> None:
        """Nothing to do."""

    def ended(self) -> None:
        """Nothing to do."""


class _Call:
    """One call of a layer: numbers its operations, each kind by itself."""

    def __init__(self, taps: OpTaps, path: str) -> None:
        self._taps = taps
        self._path = path
        self._count: Counter[str] = Counter()

    def observe(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Run an operation and look at it."""
        number = self._count[name]
        self._count[name] += 1
        return self._taps.see(self._path, number, name, args, kwargs, run)


def op_patterns(
    plan: Plan, paths: Iterable[str], known: frozenset[str] = KNOWN, groups: Groups = GROUPS
) -> list[Pattern]:
    """The patterns that mean operations: `op:…`, and `layer/name` where both the layer and the name are known."""
    there = set(paths)
    patterns = [p for probe in plan.probes for p in probe.patterns]
    return [p for p in patterns if p.kind == "op" or _means_op(p, there, known, groups)]


def _means_op(pattern: Pattern, paths: set[str], known: frozenset[str], groups: Groups) -> bool:
    operation = pattern.operation
    if operation is None:
        return False
    names = {name for name in known if operation.names.fullmatch(name)}
    names.update(name for group in operation.groups for name in groups.get(group, ()))
    pairs = ((path, name) for path in paths for name in names)
    number = operation.number or 0
    return any(pattern.matches_op(path, name, number, port, groups) for path, name in pairs for port in FORWARD_PORTS)


def clean(owner: Any) -> None:
    """What a layer has kept of traced arrays is plain again; lists and dicts stay the ones they are."""
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


def _given(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    found = [(slot, as_array(value)) for slot, value in values_in(args, Arrays)]
    found += [(slot, as_array(v)) for slot, v in values_in({k: v for k, v in kwargs.items() if k != "out"}, Arrays)]
    return [("", found[0][1])] if len(found) == 1 else found
