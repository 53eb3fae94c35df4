"""Several models as one adapter: each has its own, all record into one step, and names tell them apart."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tensortap.adapters.protocol import Clock, Plan, Port
from tensortap.adapters.torch.adapter import TorchAdapter
from tensortap.adapters.torch.modules.tree import unwrapped
from tensortap.adapters.torch.ops.names import known_operations
from tensortap.adapters.torch.ops.taps import means_operations
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.select.probes import Probe
from tensortap.select.sites import Candidate, Pattern
from tensortap.types import Place


class Model:
    """One of the models. With a prefix its places are called `prefix.path`, and patterns may say either."""

    def __init__(self, root: nn.Module, name: str, prefix: str, home: int) -> None:
        inner = unwrapped(root)
        self.name = name
        self.type = type(inner).__name__
        self.prefix = prefix
        self.adapter = TorchAdapter(inner)
        self._home = home

    def candidates(self) -> Iterator[tuple[Candidate, Candidate]]:
        """Every place, as the model itself calls it and as the run does."""
        for candidate in self.adapter.candidates():
            yield candidate, candidate._replace(path=_joined(self.prefix, candidate.path))

    def choose(self, patterns: Sequence[Pattern], probes: tuple[Probe, ...] = ()) -> _ModelPlan:
        """What the patterns, all of one probe, want of it. That may be nothing."""
        ports: dict[tuple[str, str], list[tuple[Pattern, int]]] = {}
        for plain, full in self.candidates():
            for pattern in patterns:
                for port in plain.ports:
                    if pattern.matches(full, port) or pattern.matches(plain, port):
                        ports.setdefault((plain.path, port), []).append((pattern, 1))
        wanted = _ModelPlan(ports, probes)
        wanted.prefix = self.prefix
        return wanted

    def has(self, pattern: Pattern) -> bool:
        """Whether a pattern chooses anything of it; of operations that is known only while it runs."""
        paths = (candidate.path for pair in self.candidates() for candidate in pair)
        return bool(self.choose([pattern]).ports) or means_operations(pattern, paths)

    def attach(self, recorder: Recorder, patterns: Sequence[Pattern], clock: Clock) -> None:
        """Put its taps on. Steps are found for all models together, so its own search for them is told to rest."""
        # All patterns, for the recorder knows those only that mean something of the first model.
        probes = tuple(replace(probe, patterns=tuple(patterns)) for probe in recorder.probes)
        self.adapter.attach(recorder, self.choose(patterns, probes), _Resting(clock))
        # The models share the first one's thread: a step must not be written by two.
        self.adapter._detector._home = self._home

    def unseen(self, patterns: Collection[str]) -> dict[str, str]:
        """What was wanted of it and never seen: sites, and patterns that could mean any model's."""
        missing = self.adapter.unseen().items()
        return {name if name in patterns else _joined(self.prefix, name): why for name, why in missing}


class Models:
    """The adapter of all of them, for one probe. Models join while it is attached."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self.patterns = tuple(patterns)
        self.members: list[Model] = []
        self._recorder: Recorder | None = None
        self._clock: Clock | None = None

    def join(self, model: Model) -> None:
        """One more."""
        self.members.append(model)
        if self._recorder is not None and self._clock is not None:
            model.attach(self._recorder, self.patterns, self._clock)

    def matching(self) -> tuple[Pattern, ...]:
        """The patterns that choose something of the models there are."""
        return tuple(p for p in self.patterns if any(model.has(p) for model in self.members))

    def candidates(self) -> list[Candidate]:
        """Every place under both its names."""
        return [candidate for model in self.members for pair in model.candidates() for candidate in pair]

    def untappable(self) -> dict[str, str]:
        """What cannot be tapped."""
        return {
            _joined(model.prefix, path): why
            for model in self.members
            for path, why in model.adapter.untappable().items()
        }

    def operations(self) -> Collection[str]:
        """The names of operations that patterns may mean."""
        return known_operations()

    def describe(self) -> dict[str, Any]:
        """The first model's tree; the others' are added when they join."""
        return self.members[0].adapter.describe()

    def attach(self, recorder: Recorder, plan: Plan, clock: Clock) -> None:
        """Put the taps on those that are there. What is wanted of later ones is decided when they come."""
        self._recorder, self._clock = recorder, clock
        for model in self.members:
            model.attach(recorder, self.patterns, clock)

    def arm(self) -> None:
        """A step has opened."""
        for model in self.members:
            model.adapter.arm()

    def detach(self) -> None:
        """Take the taps off."""
        for model in self.members:
            model.adapter.detach()

    def current(self) -> OpenStep:
        """The calling thread's step."""
        return self.members[0].adapter.current()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        before = [model.adapter.enter(step) for model in self.members]
        return before[0]

    def closing(self, step: OpenStep) -> None:
        """A step is about to close."""
        for model in self.members:
            model.adapter.closing(step)

    def left_open(self) -> list[OpenStep]:
        """Other threads' steps that still wait for a backward."""
        return [step for model in self.members for step in model.adapter.left_open()]

    def named(self, name: str, value: Any) -> bool:
        """A value the user named."""
        return self.members[0].adapter.named(name, value)

    def unseen(self) -> dict[str, str]:
        """What was wanted and never seen; of a pattern for operations or named values, in none of the models."""
        texts = {pattern.text for pattern in self.patterns}
        missing = [model.unseen(texts) for model in self.members]
        return {
            name: why
            for found in missing
            for name, why in found.items()
            if name not in texts or all(name in other for other in missing)
        }


class _ModelPlan(Plan):
    """What is wanted of one of several models: its places carry the model's name."""

    prefix: str

    def of(self, recorder: Recorder, path: str, port: str) -> Port | None:
        patterns = self.ports.get((path, port))
        return _Port(recorder, path, port, patterns, self.prefix) if patterns else None

    def site(self, path: str) -> str:
        return _joined(self.prefix, path)


class _Port(Port):
    __slots__ = ("prefix",)

    def __init__(
        self, recorder: Recorder, path: str, port: str, patterns: Sequence[tuple[Pattern, int]], prefix: str
    ) -> None:
        super().__init__(recorder, path, port, patterns)
        self.prefix = prefix

    def point(self, slot: str) -> Point:
        known = self.points.get(slot)
        if known is None:
            wanted = sum({bit for pattern, bit in self.patterns if pattern.matches_slot(slot)})
            place = Place(_joined(self.prefix, self.path), self.port, slot)
            known = self.points[slot] = self.recorder.point(place, wanted)
        return known


class _Resting:
    """The tap's clock for adapters that are not to find steps themselves; threads' own steps they still close."""

    explicit = True

    def __init__(self, clock: Clock) -> None:
        self.advance = clock.advance


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}".rstrip(".") if prefix else path
