"""What an adapter is, what it is given, and how the one for a model is found."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from tensortap.adapters import capabilities
from tensortap.adapters.numpy import layers
from tensortap.distributed.ranks import World, of_environment
from tensortap.errors import PatternError, UnsupportedError, nearest
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.select.operations import GROUPS
from tensortap.select.probes import Probe
from tensortap.select.sites import Candidate, Pattern, select
from tensortap.types import Place

# Adapters (each has a folder here), by the first part of the module in which one of a model's classes is defined.
FRAMEWORKS: Final = {
    "torch": "torch", "sklearn": "numpy", "onnxruntime": "onnx", "keras": "keras", "flax": "jax", "equinox": "jax",
    "haiku": "jax",
}  # fmt: skip
# How long a compiled loop goes on is not known before: so many passes are kept, the others are counted.
MOST_LOOPS: Final = 64


class Clock(Protocol):
    """What an adapter tells the tap: that a step is over, and whether it may say so."""

    def advance(self, step: OpenStep | None = None) -> None:
        """Close the open step, or one of a thread's own."""

    @property
    def explicit(self) -> bool:
        """Whether the user closes steps with `tap.step()`."""


class OneStep:
    """A clock for a single call, in which nothing closes a step."""

    explicit = True

    def advance(self, step: OpenStep | None = None) -> None:
        """Nothing to do."""


class Adapter(Protocol):
    """Puts taps on one model and takes them off again."""

    def candidates(self) -> list[Candidate]:
        """Every place that can be tapped."""

    def untappable(self) -> dict[str, str]:
        """What cannot be tapped, each with the reason."""

    def describe(self) -> dict[str, Any]:
        """The model's tree, for `run.json`."""

    def attach(self, recorder: Recorder, plan: Plan, clock: Clock) -> None:
        """Put the taps on."""

    def arm(self) -> None:
        """A step has opened, or recording was paused or resumed: an unwanted step should carry no taps."""

    def detach(self) -> None:
        """Take off what `attach` put on, and nothing else."""

    def current(self) -> OpenStep:
        """The step that belongs to the calling thread."""

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own, or take it away; what it had before."""

    def closing(self, step: OpenStep) -> None:
        """A step is about to close: take what is only known then."""

    def left_open(self) -> list[OpenStep]:
        """Steps that other threads began and that nothing has closed yet."""

    def named(self, name: str, value: Any) -> bool:
        """Record a value the user named, and its gradient where that is wanted. False: it is none of ours."""

    def unseen(self) -> dict[str, str]:
        """Places that were wanted and never seen, each with the reason where it is known."""


@runtime_checkable
class HasOperations(Protocol):
    """An adapter that sees single operations."""

    def operations(self) -> Collection[str]:
        """The names of all there are."""


class Port:
    """One port of one module: the probes that want it, and a point for every slot that turns up in it.

    `note` says why nothing has turned up, as far as that is known; `op` is the operation, if it is that of one.
    """

    __slots__ = ("bits", "note", "op", "path", "patterns", "points", "port", "recorder")

    def __init__(
        self, recorder: Recorder, path: str, port: str, patterns: Sequence[tuple[Pattern, int]], op: str = ""
    ) -> None:
        self.recorder = recorder
        self.path = path
        self.port = port
        self.op = op
        self.patterns = tuple(patterns)
        self.bits = 0
        for _, bit in patterns:
            self.bits |= bit
        self.points: dict[str, Point] = {}
        self.note = ""

    @property
    def seen(self) -> bool:
        """Whether anything that a probe wants has turned up."""
        return any(point.probes for point in self.points.values())

    def point(self, slot: str) -> Point:
        """The point of a slot; made, and its probes decided, the first time."""
        known = self.points.get(slot)
        if known is None:
            wanted = 0
            for pattern, bit in self.patterns:
                wanted |= bit if pattern.matches_slot(slot) else 0
            known = self.points[slot] = self.recorder.point(Place(self.path, self.port, slot, self.op), wanted)
        return known


def bits_of(ports: Iterable[Port]) -> int:
    """The probes that want any of these ports."""
    bits = 0
    for port in ports:
        bits |= port.bits
    return bits


class OpName(NamedTuple):
    """One operation of a module: the module's path, what it does, and its number in one call of the module."""

    path: str
    op: str
    number: int

    def __str__(self) -> str:
        return f"/{self.op}#{self.number}"


class Plan(NamedTuple):
    """What the probes chose of a model: for every path and port the patterns, with their probes as bits."""

    ports: dict[tuple[str, str], list[tuple[Pattern, int]]]
    probes: tuple[Probe, ...] = ()

    def of(self, recorder: Recorder, path: str, port: str) -> Port | None:
        """The port of a module, if any probe wants it."""
        patterns = self.ports.get((path, port))
        return Port(recorder, path, port, patterns) if patterns else None

    def port_for_named_value(self, recorder: Recorder, candidate: Candidate, port: str) -> Port | None:
        """The port of what was not known at set-up: a value the user named. A pattern for it needs a slash."""
        patterns = [
            (pattern, 1 << i)
            for i, probe in enumerate(self.probes)
            for pattern in probe.patterns
            if _chooses(pattern, candidate, port)
        ]
        return Port(recorder, candidate.path, port, patterns) if patterns else None

    def site(self, path: str) -> str:
        """What the run calls a path of this model."""
        return path

    def port_for_operation(self, recorder: Recorder, call: OpName, port: str, mask: int = -1) -> Port | None:
        """The port of an operation, which is known only while it runs; `mask` leaves probes out."""
        patterns = [
            (pattern, 1 << i)
            for i, probe in enumerate(self.probes)
            for pattern in probe.patterns
            if mask >> i & 1 and self._means(pattern, call, port)
        ]
        return Port(recorder, f"{self.site(call.path)}{call}", port, patterns, call.op) if patterns else None

    def _means(self, pattern: Pattern, call: OpName, port: str) -> bool:
        paths = {call.path, self.site(call.path)}
        return any(pattern.matches_op(path, call.op, call.number, port, GROUPS) for path in paths)

    def waiting(self, names: Iterable[str], ports: Sequence[str]) -> list[Pattern]:
        """The patterns that could only mean values the user names, and that none of these names answers."""
        seen = [Candidate(name, (), tuple(ports)) for name in names]
        late = [pattern for probe in self.probes for pattern in probe.patterns if _only_late(pattern)]
        return [p for p in late if not any(p.matches(candidate, port) for candidate in seen for port in ports)]


def _only_late(pattern: Pattern) -> bool:
    return pattern.is_op and pattern.kind == "path"


def _chooses(pattern: Pattern, candidate: Candidate, port: str) -> bool:
    """As `pattern.matches`; a user's function that expects a module says no to anything else."""
    try:
        return pattern.matches(candidate, port)
    except PatternError:
        return False


def choose(probes: Sequence[Probe], candidates: Sequence[Candidate], *, late: bool = False) -> Plan:
    """Decide once which probes want which places. A pattern that matches nothing raises, unless more come late."""
    ports: dict[tuple[str, str], list[tuple[Pattern, int]]] = {}
    for i, probe in enumerate(probes):
        for matches in select(probe.patterns, candidates, late=late):
            for match in matches:
                ports.setdefault((match.candidate.path, match.port), []).append((match.pattern, 1 << i))
    return Plan(ports, tuple(probes))


def offered(adapter: Any, probes: Sequence[Probe]) -> Plan:
    """What the probes choose of an adapter's places. What its framework cannot give is refused, and why is said."""
    framework = adapter.describe().get("framework")
    if framework in capabilities.ADAPTERS:
        for probe in probes:
            for pattern in probe.patterns:
                capabilities.refuse(capabilities.of(framework), pattern)
    for pattern in (p for probe in probes for p in probe.patterns if hasattr(adapter, "refuse")):
        adapter.refuse(pattern)
    check_operations(probes, adapter)
    candidates = adapter.candidates()
    _refuse_untappable(adapter, probes, candidates)
    return choose(probes, candidates, late=getattr(adapter, "late", False))


def _refuse_untappable(adapter: Adapter, probes: Sequence[Probe], candidates: Sequence[Candidate]) -> None:
    """A place that was named exactly and cannot be tapped: say why."""
    paths = {candidate.path for candidate in candidates}
    for pattern in (p for probe in probes for p in probe.patterns if p.kind == "path" and p.head not in paths):
        if why := adapter.untappable().get(pattern.head):
            raise PatternError(f"{pattern.text!r} cannot be tapped: it {why}")


def check_operations(probes: Sequence[Probe], adapter: Any) -> None:
    """Raise for a pattern `op:name` that no operation of the framework fits, with the names nearest to it."""
    for pattern in (pattern for probe in probes for pattern in probe.patterns):
        operation = pattern.operation if pattern.kind == "op" else None
        if operation is None:
            continue
        if adapter is None:
            raise PatternError(
                f"{pattern.text!r}: there is no model to see operations of. Write ops({operation.text!r})"
            )
        if not isinstance(adapter, HasOperations):
            raise PatternError(f"{pattern.text!r}: single operations are not seen in this framework")
        groups = getattr(adapter, "groups", GROUPS)
        if unknown := [group for group in operation.groups if group not in groups]:
            near = _or([f"op:@{name}" for name in nearest(unknown[0], groups, 1)])
            raise PatternError(
                f"{pattern.text!r}: there is no group {unknown[0]!r} of operations, only {', '.join(groups)}.{near}"
            )
        known = adapter.operations()
        if not any(operation.means(name, groups) for name in known):
            group = [f"op:@{operation.text}"] if operation.text in groups else []
            near = _or([*group, *(f"op:{name}" for name in nearest(operation.text, sorted(known)))])
            raise PatternError(f"{pattern.text!r}: {operation.text!r} is none of {len(known)} operations.{near}")


def _or(offers: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(map(repr, offers))}?" if offers else ""


def adapter_for(model: Any, **options: Any) -> Adapter:
    """The adapter that knows a model; an adapter stands for itself."""
    if _is_adapter(model):
        return model  # type: ignore[no-any-return]
    if inspect.isroutine(model) or isinstance(model, functools.partial):
        return _for_function(model, **options)
    found: Adapter | None = part_for(model, "adapter").adapt(model, **options)
    if found is None:
        raise UnsupportedError(_unknown(model))
    return found


def _is_adapter(model: Any) -> bool:
    # By hand: isinstance() with a protocol writes empty __annotations__ into the model's classes.
    return all(hasattr(type(model), name) for name in vars(Adapter) if not name.startswith("_"))


def _for_function(function: Any, **options: Any) -> Adapter:
    """Of a plain function the operations can be seen, if they are those of a framework that is in use."""
    if "torch" not in sys.modules:
        raise UnsupportedError(_unknown(function))
    adapter: Adapter = importlib.import_module("tensortap.adapters.torch.ops.function").FunctionAdapter(
        function, **options
    )
    return adapter


def world_now() -> World:
    """Which of several processes this is: what a framework that is loaded says, else what the launcher says."""
    if "torch.distributed" in sys.modules:
        found: World | None = importlib.import_module("tensortap.adapters.torch.distributed.world").world()
        if found is not None:
            return found
    return of_environment()


def part_for(model: Any, part: str) -> ModuleType:
    """One module of the adapter for a model, found by the frameworks that the model's classes come from.

    What no framework has made, but has layers that can be called, is NumPy-style.
    """
    adapter = next(filter(None, map(_framework, type(model).__mro__)), None)
    if adapter is None and layers.has_layers(model):
        adapter = "numpy"
    if adapter is None:
        raise UnsupportedError(_unknown(model))
    if adapter == "torch":
        part = {"origin": "nonfinite.origin", "world": "distributed.world"}.get(part, part)
    return importlib.import_module(f"tensortap.adapters.{adapter}.{part}")


def _framework(cls: type) -> str | None:
    return FRAMEWORKS.get(cls.__module__.partition(".")[0])


def compiled_values(see: Callable[[Any, str], None]) -> Callable[[Any, str], bool] | None:
    """What sees named values in compiled code, of the frameworks that are loaded; True: it is compiled, and seen to."""
    if "torch" not in sys.modules:
        return None
    return importlib.import_module("tensortap.adapters.torch.compile.receivers").CompiledNamedValues(see)  # type: ignore[no-any-return]


_A_STEP: Final = "; or watch a step of JAX: step = tensortap.watch_step(step, params)"


def _unknown(model: Any) -> str:
    return (
        f"an object of type {type(model).__name__} cannot be watched: there is no adapter for it (there are some for "
        f"models of {', '.join(FRAMEWORKS)}, and for objects whose layers are callables). Name values instead: "
        f"with tensortap.watch(): tensortap.tap(x, 'name'){_A_STEP if 'jax' in sys.modules else ''}"
    )
