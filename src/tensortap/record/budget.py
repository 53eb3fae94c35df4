"""Keep the cost of observing below a share of the step time by observing fewer steps."""

from __future__ import annotations

from typing import Final

from tensortap.errors import ProbeError

_FAR_APART: Final = 20  # steps between two observed ones from which histograms are thinned as well
_HISTOGRAM_EVERY: Final = 4
_MOST_CREDIT: Final = 1.0  # in observed steps: a pause in the training must not pay for a burst of them


class Budget:
    """Credit every step a share of its time, charge what observing costs, and observe only while not in debt.

    >>> budget = Budget(0.1)
    >>> observed = []
    >>> for step in range(10):
    ...     observed.append(budget.allows())
    ...     budget.closed(own=0.3 if observed[-1] else 0.0, whole=1.3 if observed[-1] else 1.0, observed=observed[-1])
    >>> [step for step, seen in enumerate(observed) if seen]
    [0, 3, 6, 9]

    The first `free_steps` are observed whatever they cost. From then on steps are observed in stretches of `stretch`,
    where hooks cost more to register and to remove than to keep. With `every_step_only` only probes that want every
    step are thinned, and those with a schedule are left as they are.
    """

    def __init__(
        self, share: float, *, free_steps: int = 0, stretch: int = 1, every_step_only: bool = False
    ) -> None:  # fmt: skip
        if not isinstance(share, (int, float)) or not 0 < share < 1:
            raise ProbeError(
                f"budget= must be a share of the step time between 0 and 1, got {share!r}; write budget=0.02 for 2 %"
            )
        self.share = share
        self.every_step_only = every_step_only
        self._free = free_steps
        self._stretch = stretch
        self._left = 0  # steps of the stretch that has begun
        self.own = 0.0
        self.whole = 0.0
        self._credit = 0.0
        self._cost = 0.0
        self._since = 0
        self._observed = 0

    @property
    def used(self) -> float:
        """Return what observing has cost so far, as a share of the time without it."""
        bare = self.whole - self.own
        return self.own / bare if bare > 0 else 0.0

    def allows(self) -> bool:
        """Return whether the step that is about to open may be observed."""
        if self._free > 0:
            return True
        if self._left <= 0 and self._credit >= 0:
            self._left = self._stretch
        return self._left > 0

    def histograms(self) -> bool:
        """Return whether it may take histograms too: where observed steps are far apart, only every fourth does."""
        return self._since < _FAR_APART or self._observed % _HISTOGRAM_EVERY == 0

    def closed(self, own: float, whole: float, observed: bool) -> None:
        """Note that a step took `whole` seconds, of which `own` were spent observing."""
        self.own += own
        self.whole += whole
        if self._free > 0:
            self._free -= 1
            return
        self._left -= observed
        self._credit += self.share * max(whole - own, 0.0) - own
        if observed:
            self._cost, self._since = own, 0
            self._observed += 1
        else:
            self._since += 1
        self._credit = min(self._credit, _MOST_CREDIT * self._cost)
