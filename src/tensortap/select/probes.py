"""Probes: the sites to observe, what to keep, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tensortap.errors import ProbeError
from tensortap.reduce.reducers import Custom, Hash, Histogram, Keeper, Quantiles, Reducer, as_reducers
from tensortap.select.sites import Candidate, Pattern
from tensortap.select.triggers import Trigger, as_trigger, following, nonfinite
from tensortap.types import Call

MOST_PROBES = 63  # a row notes the probes it was taken for in one 64-bit word


@dataclass(frozen=True, slots=True)
class Probe:
    """Which sites, what to keep, when.

    >>> probe("blocks.*.mlp:output", "head:input").patterns[1].text
    'head:input'
    """

    patterns: tuple[Pattern, ...]
    keep: tuple[Reducer, ...]
    when: Trigger
    escalate: Probe | None = None
    where: Callable[[Call], bool] | None = None

    @property
    def histogram(self) -> bool:
        """Whether the histogram is needed for what is kept."""
        return any(isinstance(r, (Histogram, Quantiles)) for r in self.keep)

    @property
    def hashed(self) -> bool:
        """Whether the content hash is kept."""
        return any(isinstance(r, Hash) for r in self.keep)

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The quantiles to write beside the statistics."""
        return tuple(q for r in self.keep if isinstance(r, Quantiles) for q in r.at)

    @property
    def keepers(self) -> tuple[Keeper, ...]:
        """The reducers that keep elements."""
        return tuple(r for r in self.keep if isinstance(r, Keeper))

    @property
    def customs(self) -> tuple[Custom, ...]:
        """The user's functions."""
        return tuple(r for r in self.keep if isinstance(r, Custom))

    def describe(self) -> dict[str, Any]:
        """Return the probe as plain data, for `run.json`."""
        return {
            "sites": [pattern.text for pattern in self.patterns],
            "keep": [str(reducer) for reducer in self.keep],  # for people; programs read `reducers`
            "reducers": [reducer.describe() for reducer in self.keep],
            "when": str(self.when),
        } | ({} if self.where is None else {"where": getattr(self.where, "__qualname__", str(self.where))})


def probe(
    *sites: str | Pattern | Callable[[Candidate], bool],
    keep: Reducer | Callable[[Any], Any] | Iterable[Reducer | Callable[[Any], Any]] | None = None,
    when: Trigger | Callable[..., bool] | None = None,
    escalate: Escalation | None = None,
    where: Callable[[Call], bool] | None = None,
) -> Probe:
    """Observe `sites`, keep statistics and histogram (or what `keep` says), at every step (or when `when` says so).

    >>> from tensortap.reduce.reducers import sample
    >>> from tensortap.select.triggers import every
    >>> print(probe("fc", keep=sample(256), when=every(100)).when)
    every(100)

    With `escalate` more is kept, for some steps after a trigger: see `escalation`. With `where` only those calls of
    an operation are recorded for which it says yes, given the `Call`:

    >>> wide = probe("op:matmul", where=lambda call: call.args[0].shape[-1] > 64)
    """
    if not sites:
        raise ProbeError('a probe must have at least one pattern, got none: write probe("**") to observe everything')
    patterns = tuple(Pattern.parse(site) for site in sites)
    _check_where(where, patterns)
    raised = None if escalate is None else escalate.probe(patterns, where)
    return Probe(patterns, as_reducers(keep), as_trigger(when), raised, where)


def _check_where(where: Any, patterns: tuple[Pattern, ...]) -> None:
    """Refuse a predicate beside sites that are not operations: it is asked about calls of operations."""
    if where is None:
        return
    if not callable(where):
        raise ProbeError(
            f"where= must be a function of the call, got {where!r}: write where=lambda call: call.number == 0"
        )
    if other := next((pattern for pattern in patterns if not pattern.is_op), None):
        raise ProbeError(
            f"where= must be given to a probe of operations only, got the pattern {other.text!r}: write a probe of its "
            "own, such as probe('op:matmul', where=...)"
        )


@dataclass(frozen=True, slots=True)
class Escalation:
    """More detail for a while: what to keep in addition, after which trigger, and for how many steps."""

    sites: tuple[Pattern, ...]
    keep: tuple[Reducer, ...]
    when: Trigger

    def probe(self, patterns: tuple[Pattern, ...], where: Callable[[Call], bool] | None = None) -> Probe:
        """Return the probe that keeps more, on sites of its own or on those it escalates from, with their predicate."""
        return Probe(self.sites or patterns, self.keep, self.when, where=None if self.sites else where)


def escalation(
    *sites: str | Pattern | Callable[[Candidate], bool],
    keep: Any,
    when: Trigger | Callable[..., bool] | None = None,
    steps: int = 10,
) -> Escalation:
    """Keep more for `steps` steps after a trigger (by default a non-finite value), then fall back by itself.

    >>> from tensortap.reduce.reducers import full, stats
    >>> probe("**", keep=stats(), escalate=escalation(keep=full(), steps=3)).escalate.when
    following(nonfinite(), 3)
    """
    trigger = following(nonfinite() if when is None else when, steps)
    return Escalation(tuple(Pattern.parse(site) for site in sites), as_reducers(keep), trigger)


def is_model_or_array(item: Any) -> bool:
    """Return whether a value is a model or an array, given in the place of a pattern.

    >>> is_model_or_array("fc"), is_model_or_array(range), is_model_or_array(memoryview(b""))
    (False, False, False)
    """
    if isinstance(item, type):  # a class chooses the layers of that class
        return False
    return any(hasattr(item, name) for name in ("named_modules", "get_weights", "__array__"))


def as_probes(items: Iterable[Probe | str | Pattern | Callable[[Candidate], bool]]) -> tuple[Probe, ...]:
    """Return the arguments of `watch` as probes: bare patterns are combined into one default probe."""
    given = tuple(items)
    for item in given:
        if is_model_or_array(item):
            raise ProbeError(
                f"watch() takes one model, then patterns and probes; got a {type(item).__name__} among them. Watch "
                "another model by a call of its own, tt.watch(other), or put both into one module"
            )
    bare = [item for item in given if not isinstance(item, Probe)]
    # A trigger may keep history: a probe given to two taps must not share it.
    probes = tuple(replace(item, when=item.when.fresh()) for item in given if isinstance(item, Probe))
    probes = (probe(*bare), *probes) if bare else probes
    raised = tuple(replace(p.escalate, when=p.escalate.when.fresh()) for p in probes if p.escalate is not None)
    probes += raised
    if len(probes) > MOST_PROBES:
        raise ProbeError(
            f"there must be at most {MOST_PROBES} probes, got {len(probes)}: write one probe with several patterns"
        )
    return probes
