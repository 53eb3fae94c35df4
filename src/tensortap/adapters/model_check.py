"""The contract of `tt.check_model` with a framework: the checks by name, and the model with its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tensortap.finding import Findings

CHECKS: Final[Mapping[str, str]] = {
    "not_deterministic": "two calls from one state and seed differ",
    "samples_mixed": "a sample's output depends on other samples of the batch",
    "future_seen": "the output at a position depends on later positions",
    "padding_seen": "the result depends on how much padding there is",
    "no_gradient": "a trainable parameter gets no gradient",
    "targets_unpaired": "the loss does not tell which target belongs to which sample, or refuses them",
    "initial_loss": "the loss of the untrained model is far above that of guessing",
    "cannot_overfit": "a few steps on one batch do not lower the loss",
    "mode_differs": "training and evaluation mode compute something different",
    "bf16_differs": "bf16 computes something different",
}


class ModelQuestion(NamedTuple):
    """A model, what it is called with, and how its loss is computed."""

    model: Any
    batch: Any
    target: Any = None
    loss: Callable[..., Any] | None = None
    batch_axis: int | None = None  # 0 by default
    causal: bool | None = None  # None: found out from the target
    steps: int = 30  # of training on the one batch
    seconds: float = 10.0  # that training may take


@dataclass(frozen=True, slots=True)
class RankedSample:
    """One sample of a batch, run alone: how suspicious it is, and why."""

    row: int
    suspicion: float
    bad_inputs: int  # elements that are not finite
    size: float  # of its values, as a multiple of the batch's median
    loss: float | None
    site: str  # the first module whose output is not finite
    gradient_share: float | None  # of the norms of all samples' gradients; NaN where its own is not finite

    def __str__(self) -> str:
        said = [f"{self.bad_inputs} input values not finite"] if self.bad_inputs else []
        said += [f"size {self.size:.3g} times the median"] if self.size > 10 else []
        said += [f"first not finite at {self.site}"] if self.site else []
        said += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        said += [] if self.gradient_share is None else [_gradient(self.gradient_share)]
        return f"sample {self.row}: {', '.join(said) or 'nothing unusual'}"


def _gradient(share: float) -> str:
    return f"{share:.1%} of the gradient" if math.isfinite(share) else "gradient not finite"


class ModelCheck:
    """A model that is being checked; when the block ends it is as it was."""

    def run(self, names: Sequence[str]) -> Findings:
        """Return what the checks of these names found."""
        raise NotImplementedError

    def training_step(self) -> bool:
        """Run forward, loss and backward once; False where no loss is known."""
        raise NotImplementedError

    def rank_samples(self, gradients: bool) -> tuple[RankedSample, ...]:
        """Run every sample alone and return them, the most suspicious first."""
        raise NotImplementedError
