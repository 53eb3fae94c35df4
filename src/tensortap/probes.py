"""A probe: which sites, what to keep of them, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tensortap.errors import ProbeError
from tensortap.reduce.reducers import Custom, Histogram, Keeper, Quantiles, Reducer, as_reducers
from tensortap.sites import Candidate, Pattern
from tensortap.triggers import Trigger, as_trigger

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

    @property
    def histogram(self) -> bool:
        """Whether the histogram is needed for what is kept."""
        return any(isinstance(r, (Histogram, Quantiles)) for r in self.keep)

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
        """Itself as plain data, for `run.json`."""
        return {
            "sites": [pattern.text for pattern in self.patterns],
            "keep": [str(reducer) for reducer in self.keep],
            "when": str(self.when),
        }


def probe(
    *sites: str | Pattern | Callable[[Candidate], bool],
    keep: Reducer | Callable[[Any], Any] | Iterable[Reducer | Callable[[Any], Any]] | None = None,
    when: Trigger | Callable[..., bool] | None = None,
) -> Probe:
    """Observe `sites`, keep statistics and histogram (or what `keep` says), at every step (or when `when` says so).

    >>> from tensortap.reduce.reducers import sample
    >>> from tensortap.triggers import every
    >>> print(probe("fc", keep=sample(256), when=every(100)).when)
    every(100)
    """
    if not sites:
        raise ProbeError('a probe needs at least one site pattern: probe("**") observes everything')
    return Probe(tuple(Pattern.parse(site) for site in sites), as_reducers(keep), as_trigger(when))


def as_probes(items: Iterable[Probe | str | Pattern | Callable[[Candidate], bool]]) -> tuple[Probe, ...]:
    """What was given to `watch`: probes as they are, bare patterns gathered into one default probe."""
    given = tuple(items)
    bare = [item for item in given if not isinstance(item, Probe)]
    # A trigger may keep history: a probe given to two taps must not share it.
    probes = tuple(replace(item, when=item.when.fresh()) for item in given if isinstance(item, Probe))
    probes = (probe(*bare), *probes) if bare else probes
    if len(probes) > MOST_PROBES:
        raise ProbeError(f"{len(probes)} probes are more than {MOST_PROBES}; give one probe several patterns instead")
    return probes
