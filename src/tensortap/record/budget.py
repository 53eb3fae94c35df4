"""Keeping the cost of observing below a share of the step time, by observing fewer steps."""

from __future__ import annotations

from typing import Final

from tensortap.errors import ProbeError

_LONG: Final = 20  # steps between two observed ones from which histograms are thinned as well
_HISTOGRAM_EVERY: Final = 4
_MOST_CREDIT: Final = 1.0  # in observed steps: a pause in the training must not buy a burst


class Budget:
    """A running account: every step earns a share of its time, observing spends, and a debt is paid back first.

    >>> budget = Budget(0.1)
    >>> observed = []
    >>> for step in range(10):
    ...     observed.append(budget.allows())
    ...     budget.closed(own=0.3 if observed[-1] else 0.0, whole=1.3 if observed[-1] else 1.0, observed=observed[-1])
    >>> [step for step, seen in enumerate(observed) if seen]
    [0, 3, 6, 9]
    """

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise ProbeError(f"budget={share!r} is no share of the step time; write budget=0.02 for 2 %")
        self.share = share
        self.own = 0.0
        self.whole = 0.0
        self._credit = 0.0
        self._cost = 0.0
        self._since = 0
        self._observed = 0

    @property
    def used(self) -> float:
        """What observing has cost so far, as a share of the time without it."""
        bare = self.whole - self.own
        return self.own / bare if bare > 0 else 0.0

    def allows(self) -> bool:
        """Whether the step that is about to open may be observed."""
        return self._credit >= 0

    def histograms(self) -> bool:
        """Whether its histograms may be taken too: where observed steps are far apart, only with every fourth."""
        return self._since < _LONG or self._observed % _HISTOGRAM_EVERY == 0

    def closed(self, own: float, whole: float, observed: bool) -> None:
        """A step took `whole` seconds, of which `own` were ours."""
        self.own += own
        self.whole += whole
        self._credit += self.share * max(whole - own, 0.0) - own
        if observed:
            self._cost, self._since = own, 0
            self._observed += 1
        else:
            self._since += 1
        self._credit = min(self._credit, _MOST_CREDIT * self._cost)
