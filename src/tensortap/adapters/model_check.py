"""What `tt.check_model` asks of a framework: the checks by name, and the model with what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    batch_axis: int | None = None  # 0 where nobody says otherwise
    causal: bool | None = None  # None: found out from the target
    steps: int = 30  # of training on the one batch
    seconds: float = 10.0  # that training may take


class ModelCheck:
    """A model that is being checked; when the block ends it is as it was."""

    def run(self, names: Sequence[str]) -> Findings:
        """Return what the checks of these names found."""
        raise NotImplementedError

    def training_step(self) -> bool:
        """Run forward, loss and backward once; False where no loss is known."""
        raise NotImplementedError
