"""A trigger for replicas that are no longer the same on all ranks."""

from __future__ import annotations

from tensortap.select.triggers.base import Answer, Trigger, maker, whole
from tensortap.types import StepOutcome


class _Desync(Trigger):
    def __init__(self, every: int) -> None:
        self.every = every

    @property
    def compares_replicas(self) -> bool:
        return True

    def before(self, step: int) -> Answer:
        return Answer.NO if step % self.every else Answer.MAYBE

    def after(self, step: int, seen: StepOutcome) -> str | None:
        if step % self.every or not seen.unequal_replicas:
            return None
        return f"{self}: {seen.unequal_replicas}"

    def __repr__(self) -> str:
        return f"desync({'' if self.every == 1 else f'every={self.every}'})"


@maker
def desync(every: int = 1) -> Trigger:
    """Fire when replicas differ: a parameter, gradient, update or buffer that ranks share is not the same on all.

    Ranks compare the hashes that a probe keeps, such as `probe("**:param", keep=[stats(), content_hash()])`, and send
    each other nothing: each posts its own beside the run, and reads those that are there. Where another rank is behind,
    the answer comes a step or two later, and `lookback=` keeps the step itself. With `watch(global_stats=True)` hashes
    go with its all-reduce, and the answer comes in the same step on every rank. It fires once, and again only after the
    replicas were equal in between. `every=10` looks at every tenth step.
    """
    return _Desync(whole(every, 1, "every of desync()", "desync(every=10)"))
