"""What an adapter is, what it is given, and how the one for a model is found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from tensortap.errors import PatternError, UnsupportedError
from tensortap.probes import Probe
from tensortap.recorder import OpenStep, Point, Recorder
from tensortap.sites import Candidate, Pattern, select
from tensortap.types import Place

# Frameworks, by the first part of the module in which one of a model's classes is defined; each has a folder here.
FRAMEWORKS: Final = ("torch",)


class Clock(Protocol):
    """What an adapter tells the tap: that a step is over, and whether it may say so."""

    def advance(self, step: OpenStep | None = None) -> None:
        """Close the open step, or one of a thread's own."""

    @property
    def explicit(self) -> bool:
        """Whether the user closes steps with `tap.step()`."""


@runtime_checkable
class Adapter(Protocol):
    """Puts taps on one model and takes them off again."""

    def candidates(self) -> list[Candidate]:
        """Every place that can be tapped."""

    def untappable(self) -> dict[str, str]:
        """What cannot be tapped, each with the reason."""

    def describe(self) -> dict[str, Any]:
        """The model's tree, for `run.json`."""

    def attach(self, recorder: Recorder, wanted: Wanted, clock: Clock) -> None:
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


class Port:
    """One port of one module: the probes that want it, and a point for every slot that turns up in it.

    `note` says why nothing has turned up, as far as that is known.
    """

    __slots__ = ("bits", "note", "path", "patterns", "points", "port", "recorder")

    def __init__(self, recorder: Recorder, path: str, port: str, patterns: Sequence[tuple[Pattern, int]]) -> None:
        self.recorder = recorder
        self.path = path
        self.port = port
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
            known = self.points[slot] = self.recorder.point(Place(self.path, self.port, slot), wanted)
        return known


class Wanted(NamedTuple):
    """What the probes chose of a model: for every path and port the patterns, with their probes as bits."""

    ports: dict[tuple[str, str], list[tuple[Pattern, int]]]
    probes: tuple[Probe, ...] = ()

    def of(self, recorder: Recorder, path: str, port: str) -> Port | None:
        """The port of a module, if any probe wants it."""
        patterns = self.ports.get((path, port))
        return Port(recorder, path, port, patterns) if patterns else None

    def of_late(self, recorder: Recorder, candidate: Candidate, port: str) -> Port | None:
        """The port of what was not known at set-up: a value the user named. A pattern for it needs a slash."""
        patterns = [
            (pattern, 1 << i)
            for i, probe in enumerate(self.probes)
            for pattern in probe.patterns
            if _chooses(pattern, candidate, port)
        ]
        return Port(recorder, candidate.path, port, patterns) if patterns else None


def _chooses(pattern: Pattern, candidate: Candidate, port: str) -> bool:
    """As `pattern.matches`; a user's function that expects a module says no to anything else."""
    try:
        return pattern.matches(candidate, port)
    except PatternError:
        return False


def choose(probes: Sequence[Probe], candidates: Sequence[Candidate]) -> Wanted:
    """Decide once which probes want which places. A pattern that matches nothing raises."""
    ports: dict[tuple[str, str], list[tuple[Pattern, int]]] = {}
    for i, probe in enumerate(probes):
        for matches in select(probe.patterns, candidates):
            for match in matches:
                ports.setdefault((match.candidate.path, match.port), []).append((match.pattern, 1 << i))
    return Wanted(ports, tuple(probes))


def adapter_for(model: Any, **options: Any) -> Adapter:
    """The adapter that knows a model; an adapter stands for itself."""
    if isinstance(model, Adapter):
        return model
    found: Adapter | None = part_for(model, "adapter").adapt(model, **options)
    if found is None:
        raise UnsupportedError(_unknown(model))
    return found


def part_for(model: Any, part: str) -> ModuleType:
    """One module of the adapter for a model, found by the frameworks that the model's classes come from."""
    for cls in type(model).__mro__:
        framework = cls.__module__.partition(".")[0]
        if framework in FRAMEWORKS:
            return importlib.import_module(f"tensortap.adapters.{framework}.{part}")
    raise UnsupportedError(_unknown(model))


def compiled_values(see: Callable[[Any, str], None]) -> Callable[[Any, str], bool] | None:
    """What sees named values in compiled code, of the frameworks that are loaded; True: it is compiled, and seen to."""
    for framework in FRAMEWORKS:
        if framework in sys.modules:
            part = importlib.import_module(f"tensortap.adapters.{framework}.values")
            return part.CompiledValues(see)  # type: ignore[no-any-return]
    return None


def _unknown(model: Any) -> str:
    return (
        f"an object of type {type(model).__name__} cannot be watched: there is no adapter for it (there is one for "
        f"models of {', '.join(FRAMEWORKS)}). Name values instead: with tensortap.watch(): tensortap.tap(x, 'name')"
    )
