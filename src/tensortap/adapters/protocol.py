"""The adapter contract: `Adapter` puts taps on one model, `Framework` is everything one framework offers.

Both are base classes with a default for whatever is optional. A new framework is a package here with a
`framework.py` whose `FRAMEWORK` is an object of a subclass, and a line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.adapters.batches import host_arrays
from tensortap.adapters.capabilities import Capabilities, refuse
from tensortap.adapters.model_check import ModelCheck, ModelQuestion
from tensortap.adapters.plan import Groups, Plan, check_operation, choose
from tensortap.adapters.results import Captured, ModelIdentity, Origin, full_site_name
from tensortap.adapters.rng import seeded_rng
from tensortap.adapters.steps import StepDetector
from tensortap.adapters.verification import VerificationSubject
from tensortap.distributed.ranks import World
from tensortap.errors import PatternError, UnsupportedError
from tensortap.record.pending import PendingNumber
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.operations import GROUPS
from tensortap.select.probes import Probe
from tensortap.select.sites import Candidate, Pattern

FastPath = Literal["keep", "leave"]
See = Callable[[str, npt.NDArray[Any]], None]  # is given a site and its tensor, whose memory may change afterwards
ForwardPass = Callable[[Any, See], None]  # calls the model with a batch
Doubles = npt.NDArray[np.float64]


class AdapterOptions(NamedTuple):
    """What `watch` tells an adapter: whether fused layers stay fused, whether origins of NaN are looked for, and
    whether the training context is recorded.
    """

    fast_path: FastPath = "keep"
    origins: bool = False
    context: bool = False


DEFAULT_OPTIONS: Final = AdapterOptions()


def watched_by_default(site: Candidate) -> bool:
    """Choose what is watched when no probe is given: modules without children, or what the adapter says."""
    return site.leaf if site.default is None else site.default


class Adapter:
    """Put taps on one model and take them off again.

    `attach` sets `steps`, the detector that reports finished steps; all else has a default.
    """

    capabilities: Capabilities
    locates_backward: bool = False  # whether tt.locate_nonfinite names operations of backward
    steps: StepDetector[Any]
    function: Callable[..., Any] | None = None  # the plain function that is watched
    names_only = False  # there is no model: patterns can only mean values that the user names
    more_sites_later = False  # sites are known only when they run, so a pattern that matches none yet is kept
    changes_in_calls = False  # `change` may come while the model is called: what it calls then has the new taps

    def candidates(self) -> list[Candidate]:
        """Return every place that can be tapped."""
        return []

    def untappable(self) -> dict[str, str]:
        """Return what cannot be tapped, each with the reason."""
        return {}

    def operations(self) -> Collection[str]:
        """Return the names of all single operations that patterns can match; none if the framework does not
        show them.
        """
        return ()

    @property
    def groups(self) -> Groups:
        """What patterns such as `op:@matmul` mean."""
        return GROUPS

    def default_sites(self) -> str | Callable[[Candidate], bool]:
        """Return the sites that are watched when the user names none."""
        return watched_by_default

    def describe(self) -> dict[str, Any]:
        """Return the model's tree, for `run.json`."""
        return {}

    def refuse(self, pattern: Pattern) -> None:
        """Raise if everything that a pattern can match is missing in this model or its framework."""
        refuse(self.capabilities, pattern)

    def plan(self, probes: Sequence[Probe]) -> Plan:
        """Return the sites of this model that the probes choose; raise for a pattern that matches nothing."""
        known: Collection[str] | None = None
        for pattern in (pattern for probe in probes for pattern in probe.patterns):
            self.refuse(pattern)
            if pattern.kind == "op":  # a framework has thousands of operations, and listing them takes a while
                known = self.operations() if known is None else known
                check_operation(pattern, known, self.groups)
        candidates = self.candidates()
        _refuse_untappable(self, probes, {candidate.path for candidate in candidates})
        return choose(probes, candidates, late=self.more_sites_later)

    def attach(self, recorder: Recorder, plan: Plan) -> None:
        """Put the taps on, and set `steps`."""
        raise NotImplementedError

    def arm(self) -> None:
        """Prepare for the step that has opened, or for a pause: a step that no probe wants should have no taps."""

    def detach(self) -> None:
        """Remove the taps that `attach` put on, and nothing else."""

    def change(self, recorder: Recorder, plan: Plan) -> None:
        """Replace the taps by those of another plan, and go on with the steps as they are."""
        before = self.steps
        self.detach()
        self.attach(recorder, plan)
        self.steps.follow(before)

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own, or take it away; return what it had before."""
        return self.steps.enter(step)

    def collect(self, step: OpenStep) -> None:
        """Record values that are only known when a step is over, such as parameters."""

    def left_open(self) -> list[OpenStep]:
        """Return steps that began and that nothing has ended yet."""
        return self.steps.left_open()

    def mark(self, name: str, value: Any) -> Any:
        """Return a named value with a tag on it, where a traced step carries tags."""
        return value

    def named(self, name: str, value: Any) -> bool:
        """Record a value the user named, and its gradient if a probe wants it; return False if it is not this
        framework's.
        """
        return False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function that is watched."""
        raise UnsupportedError("call() is for watch(function, ...): call the watched model itself")

    def unseen(self) -> dict[str, str]:
        """Return places that were wanted and never seen, each with the reason where it is known."""
        return {}


def _refuse_untappable(adapter: Adapter, probes: Sequence[Probe], paths: Collection[str]) -> None:
    """Raise, with the reason, for a place that was named exactly and cannot be tapped."""
    named = [p for probe in probes for p in probe.patterns if p.kind == "path" and p.head not in paths]
    untappable = adapter.untappable() if named else {}
    for pattern in named:
        if why := untappable.get(pattern.head):
            raise PatternError(f"{pattern.text!r} cannot be tapped: it {why}")


class Framework:
    """Everything one framework offers. What it cannot do raises an error with its name and what to do instead."""

    capabilities: Capabilities

    def recognizes(self, value: Any) -> bool:
        """Return whether an object whose class is from no framework's module is a model of this framework."""
        return False

    def adapter(self, model: Any, options: AdapterOptions = DEFAULT_OPTIONS) -> Adapter | None:
        """Return the adapter for a model, or None for other objects of the framework."""
        raise NotImplementedError

    def function_adapter(
        self, function: Callable[..., Any] | None, options: AdapterOptions = DEFAULT_OPTIONS
    ) -> Adapter:
        """Return the adapter for the operations of a plain function; with None, for those of the following block of
        code.
        """
        raise self.unsupported("blocks")

    def capture(self, model: Any, inputs: Any, patterns: Sequence[Any]) -> Captured:
        """Call the model once and return copies of the tensors at the chosen sites."""
        raise self.unsupported("capture")

    @contextmanager
    def forward_passes(self, model: Any, patterns: Sequence[Any], stop: bool) -> Iterator[ForwardPass]:
        """Yield a function that calls the model with a batch and passes on the tensor at every chosen site.

        With `stop` the model need not go on after the last of them, where the framework can stop it.
        """

        def run(batch: Any, see: See) -> None:
            for name, value in self.capture(model, batch, patterns).items():
                see(full_site_name(name), np.asarray(value))

        yield run

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Return a context in which the framework's random numbers depend on the seed; afterwards all states are
        restored.
        """
        return seeded_rng(seed)

    def identity(self, model: Any) -> ModelIdentity:
        """Return what tells one model from another."""
        return ModelIdentity({})

    def parameters_of_call(self, model: Any) -> frozenset[str] | None:
        """Return the parameter names of a model's call; None if any name is accepted."""
        return None

    def sites_of_call(self, model: Any, inputs: Any, sites: Sequence[Candidate]) -> list[Candidate]:
        """Call the model once, leave it as it was, and return its sites, with facts that only a call shows.

        Single operations are added where the framework shows them.
        """
        return list(sites)

    def verification(self, model: Any, batch: Any) -> AbstractContextManager[VerificationSubject]:
        """Return the subject of a verification; when the block ends the model is as it was."""
        raise self.unsupported("verify")

    def model_check(self, question: ModelQuestion) -> AbstractContextManager[ModelCheck]:
        """Return the checks of a model on one batch; when the block ends the model is as it was."""
        raise self.unsupported("check_model")

    def locate_nonfinite(self, model: Any, batch: Any) -> Origin | None:
        """Run one step and return the origin of the first NaN or infinity; the model is left as it was."""
        raise self.unsupported("origin")

    def isolated(self, model: Any, backward: bool) -> AbstractContextManager[Callable[[Any], object]]:
        """Return a function that calls the model with a batch, for a comparison; afterwards the model is as it was."""
        raise self.unsupported("compare")

    def own_batch(self, batch: Any) -> Any:
        """Return a batch of any framework's tensors, converted to tensors that this framework's models take."""
        return host_arrays(batch)

    def compiled_values(self, see: Callable[[Any, str], object]) -> Callable[[Any, str], bool] | None:
        """Return a function that passes named values in compiled code on to `see`; True: it is being compiled."""
        return None

    def number(self, value: Any) -> float | PendingNumber:
        """Return the number in a metric; one on a device is not waited for."""
        return float(value)

    def world(self) -> World | None:
        """Return which rank this process is, where the framework knows."""
        return None

    def summed(self, numbers: Doubles) -> Doubles:
        """Return the sum over all ranks: one all-reduce, which every rank must take part in."""
        raise self.unsupported("global_stats")

    def unsupported(self, feature: str) -> UnsupportedError:
        """Return the error that names the framework, the feature and the alternative."""
        return UnsupportedError(self.capabilities.refusal(feature))
