"""All models of a script as one adapter: each has its own adapter, and all record into one step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tensortap.adapters.plan import Plan, Port
from tensortap.adapters.protocol import Adapter, AdapterOptions
from tensortap.adapters.steps import StepDetector, StepListener, ThreadState
from tensortap.adapters.torch.adapter import TorchAdapter
from tensortap.adapters.torch.capabilities import CAPABILITIES
from tensortap.adapters.torch.context.recorder import CONTEXT
from tensortap.adapters.torch.modules.tree import unwrapped
from tensortap.adapters.torch.ops.names import known_operations
from tensortap.adapters.torch.ops.taps import means_operations
from tensortap.errors import PatternError
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.select.probes import Probe
from tensortap.select.sites import Candidate, Pattern, select
from tensortap.types import Place


class ScriptModel:
    """One of the models. With a prefix its sites are named `prefix.path`; patterns match either name."""

    def __init__(self, root: nn.Module, name: str, prefix: str, home: int) -> None:
        inner = unwrapped(root)
        self.key = id(root)
        self.name = name
        self.type = type(_without_wrapper(inner)).__name__
        self.prefix = prefix
        self.adapter = TorchAdapter(inner, AdapterOptions(context=True))
        CONTEXT.add_model(inner, prefix, root)
        self._home = home
        self._added: set[str] = set()
        self._parameters = frozenset(id(parameter) for parameter in root.parameters())

    def owns(self, parameters: Collection[int]) -> bool:
        """Return whether any of these parameters, by their ids, is its own."""
        return not self._parameters.isdisjoint(parameters)

    def candidates(self) -> Iterator[tuple[Candidate, Candidate]]:
        """Yield every candidate under its name in the model and under its name in the run."""
        for candidate in self.adapter.candidates():
            yield candidate, candidate._replace(path=_joined(self.prefix, candidate.path))

    def choose(self, probes: Sequence[Probe]) -> _ModelPlan:
        """Return the ports that the probes choose; the result may be empty."""
        ports: dict[tuple[str, str], list[tuple[Pattern, int]]] = {}
        patterns = [(pattern, 1 << i) for i, probe in enumerate(probes) for pattern in probe.patterns]
        for plain, full in self.candidates():
            for pattern, bit in patterns:
                for port in plain.ports:
                    if pattern.matches(full, port) or pattern.matches(plain, port):
                        ports.setdefault((plain.path, port), []).append((pattern, bit))
        wanted = _ModelPlan(ports, tuple(probes))
        wanted.prefix = self.prefix
        return wanted

    def has(self, pattern: Pattern) -> bool:
        """Return whether a pattern chooses anything; of operations that is known only while the model runs."""
        found = any(
            pattern.matches(candidate, port)
            for pair in self.candidates()
            for candidate in pair
            for port in candidate.ports
        )
        return found or means_operations(pattern, (c.path for pair in self.candidates() for c in pair))

    def plan(self, recorder: Recorder, probes: Sequence[Probe]) -> _ModelPlan:
        """Return what the probes choose of this model. The first ones are the script's and have all their patterns.

        The recorder knows only those patterns that match something in the first model.
        """
        own = [replace(known, patterns=mine.patterns) for known, mine in zip(recorder.probes, probes, strict=False)]
        return self.choose([*own, *recorder.probes[len(own) :]])

    def attach(self, recorder: Recorder, probes: Sequence[Probe], over: StepListener) -> None:
        """Attach its hooks. Steps are found for all models together, so its adapter does not look for them."""
        plan = self.plan(recorder, probes)
        self.adapter.attach(recorder, plan)
        # Sites that only the script's further probes chose are for the rules: the user did not name them.
        further = range(2, 1 << len(probes))
        self._added = {f"{path}:{port}" for (path, port), of in plan.ports.items() if all(b in further for _, b in of)}
        steps = self.adapter.steps
        steps.explicit = True
        steps.listen(over)  # threads' own steps it still finds
        # The models share the first one's thread: a step must not be written by two.
        steps.home = self._home

    def unseen(self, patterns: Collection[str]) -> dict[str, str]:
        """Return sites that were chosen and never seen, and patterns that could match any model."""
        missing = [(name, why) for name, why in self.adapter.unseen().items() if name not in self._added]
        return {name if name in patterns else _joined(self.prefix, name): why for name, why in missing}


class ScriptModels(Adapter):
    """The adapter of all models. Models join while it is attached."""

    capabilities = CAPABILITIES
    steps: SharedStepDetector
    changes_in_calls = True

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.probes = tuple(probes)
        self.patterns = tuple({pattern.text: pattern for probe in probes for pattern in probe.patterns}.values())
        self.members: list[ScriptModel] = []
        self.unmatched: dict[str, str] = {}  # patterns that matched nothing so far, and the sites that there were
        self._matched: set[str] = set()
        self._recorder: Recorder | None = None

    def join(self, model: ScriptModel) -> None:
        """Add a model."""
        self.members.append(model)
        if self._recorder is not None:
            model.attach(self._recorder, self.probes, self.steps.over)

    def wants(self, model: ScriptModel, say: Callable[[str], None]) -> bool:
        """Return whether any pattern chooses something of a model; what no pattern matched is explained."""
        wanted = False
        for pattern in self.patterns:
            if model.has(pattern):
                wanted = True
                self._matched.add(pattern.text)
                self.unmatched.pop(pattern.text, None)
            elif pattern.text not in self._matched:
                self.unmatched[pattern.text] = _explain(pattern, model)
                if not model.prefix:
                    say(self.unmatched[pattern.text])
        return wanted

    def free_prefix(self, name: str) -> str:
        """Return a name that no other model has."""
        taken = {model.prefix or model.name for model in self.members}
        return next(n for n in itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2))) if n not in taken)

    def matching(self) -> tuple[Probe, ...]:
        """Return the probes with the patterns that choose something of the models so far."""
        return tuple(
            replace(probe, patterns=tuple(p for p in probe.patterns if any(model.has(p) for model in self.members)))
            for probe in self.probes
        )

    def candidates(self) -> list[Candidate]:
        """Return every candidate under both its names."""
        return [candidate for model in self.members for pair in model.candidates() for candidate in pair]

    def described(self) -> dict[str, str]:
        """Return the class of each model by its name."""
        return {model.prefix or model.name: model.type for model in self.members}

    def untappable(self) -> dict[str, str]:
        """Return what cannot be tapped, and why."""
        return {
            _joined(model.prefix, path): why
            for model in self.members
            for path, why in model.adapter.untappable().items()
        }

    def operations(self) -> Collection[str]:
        """Return the names of operations that patterns may use."""
        return known_operations()

    def describe(self) -> dict[str, Any]:
        """Describe the first model, without a wrapper such as DistributedDataParallel."""
        return self.members[0].adapter.describe() | {"class": self.members[0].type}

    def attach(self, recorder: Recorder, plan: Plan) -> None:
        """Attach to the models that are there; later ones are attached when they join."""
        self._recorder = recorder
        recorder.number_by_phase()
        self.steps = SharedStepDetector(recorder, self.members)
        for model in self.members:
            model.attach(recorder, self.probes, self.steps.over)

    def change(self, recorder: Recorder, plan: Plan) -> None:
        """Replace the hooks of every model."""
        for model in self.members:
            model.adapter.change(recorder, model.plan(recorder, self.probes))

    def arm(self) -> None:
        """Prepare the models for the step that has opened."""
        for model in self.members:
            model.adapter.arm()

    def detach(self) -> None:
        """Remove all hooks."""
        for model in self.members:
            model.adapter.detach()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        before = [model.adapter.enter(step) for model in self.members]
        return before[0]

    def collect(self, step: OpenStep) -> None:
        """Record values that each model only knows when a step is over."""
        for model in self.members:
            model.adapter.collect(step)

    def left_open(self) -> list[OpenStep]:
        """Return other threads' steps that still wait for a backward."""
        return [step for model in self.members for step in model.adapter.left_open()]

    def named(self, name: str, value: Any) -> bool:
        """Record a value that the user named."""
        return self.members[0].adapter.named(name, value)

    def unseen(self) -> dict[str, str]:
        """Return what was chosen and never seen; a pattern for operations counts when no model matched it."""
        texts = {pattern.text for pattern in self.patterns}
        missing = [model.unseen(texts) for model in self.members]
        return {
            name: why
            for found in missing
            for name, why in found.items()
            if name not in texts or all(name in other for other in missing)
        }


class _ModelPlan(Plan):
    """The plan of one of several models: its sites begin with the model's name."""

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


class SharedStepDetector(StepDetector[ThreadState]):
    """The steps of all models together: whichever model's detector finds one over, all forget it."""

    def __init__(self, recorder: Recorder, models: Sequence[ScriptModel]) -> None:
        self._models = models
        super().__init__(recorder, ThreadState)

    def current(self) -> OpenStep:
        """Return the calling thread's step."""
        return self._models[0].adapter.steps.current()

    def over(self, step: OpenStep, metrics: Mapping[str, float]) -> None:
        """Report what one model's detector has found."""
        self.finish(step, metrics)

    def forget(self, step: OpenStep) -> None:
        """Let every model's detector forget a step."""
        for model in self._models:
            model.adapter.steps.forget(step)


def _without_wrapper(module: nn.Module) -> nn.Module:
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return _without_wrapper(unwrapped(module.module)) if isinstance(module, wrappers) else module


def _explain(pattern: Pattern, model: ScriptModel) -> str:
    try:
        select([pattern], [plain for plain, _ in model.candidates()])
    except PatternError as error:
        return str(error)
    return f"{pattern.text!r} can not be observed in a script"


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}".rstrip(".") if prefix else path
