"""Run the checks one after the other, and put the model back after each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from tensortap.adapters.model_check import CHECKS, ModelCheck, ModelQuestion, RankedSample
from tensortap.adapters.torch.model_check.fitting import cannot_overfit, initial_loss
from tensortap.adapters.torch.model_check.gradients import no_gradient
from tensortap.adapters.torch.model_check.modes import bf16_differs, mode_differs, not_deterministic
from tensortap.adapters.torch.model_check.positions import future_seen, padding_seen
from tensortap.adapters.torch.model_check.samples import samples_mixed
from tensortap.adapters.torch.model_check.subject import CheckedModel, NotApplicableError, cuda_states
from tensortap.adapters.torch.model_check.targets import targets_unpaired
from tensortap.adapters.torch.samples.single_samples import rank_samples
from tensortap.adapters.torch.state import preserved
from tensortap.finding import Finding, Findings

Check = Callable[[CheckedModel], Iterator[Finding]]
_BY_NAME: Final[dict[str, Check]] = {
    "not_deterministic": not_deterministic,
    "samples_mixed": samples_mixed,
    "future_seen": future_seen,
    "padding_seen": padding_seen,
    "no_gradient": no_gradient,
    "targets_unpaired": targets_unpaired,
    "initial_loss": initial_loss,
    "cannot_overfit": cannot_overfit,
    "mode_differs": mode_differs,
    "bf16_differs": bf16_differs,
}
assert list(_BY_NAME) == list(CHECKS)
_COMPARING: Final = ("samples_mixed", "future_seen", "padding_seen", "mode_differs", "bf16_differs")


@contextmanager
def model_check(question: ModelQuestion) -> Iterator[ModelCheck]:
    """Yield the checks of a model; afterwards it and all random states are as they were."""
    with cuda_states(question.model), preserved(question.model) as restore, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the user's model, called many times
        yield TorchModelCheck(CheckedModel(question, restore))


class TorchModelCheck(ModelCheck):
    """The checks of a module."""

    def __init__(self, subject: CheckedModel) -> None:
        self._subject = subject

    def run(self, names: Sequence[str]) -> Findings:
        """Return what the checks found; a call that fails as it is raises the model's own error."""
        found: list[Finding] = []
        done: list[str] = []
        skipped: dict[str, str] = {}
        self._subject.output()
        for name in names:
            if name in _COMPARING and any(f.rule == "not_deterministic" for f in found):
                skipped[name] = "two equal calls differ already"
            elif reason := self._ask(name, found):
                skipped[name] = reason
            else:
                done.append(name)
        return Findings.of(found, done, skipped)

    def _ask(self, name: str, found: list[Finding]) -> str:
        """Add what one check finds; return why it could not be made."""
        try:
            found.extend(_BY_NAME[name](self._subject))
        except NotApplicableError as reason:
            return str(reason)
        except Exception as error:
            return f"the model raised {type(error).__name__}: {error}"[:300]
        return ""

    def rank_samples(self, gradients: bool) -> tuple[RankedSample, ...]:
        """Run every sample alone, in evaluation mode, and return them, the most suspicious first."""
        return rank_samples(self._subject, gradients)

    def training_step(self) -> bool:
        """Run forward, loss and backward once, in training mode; False where that cannot be done."""
        subject = self._subject
        try:
            loss = subject.loss(subject.output(training=True, gradients=True))
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception:  # what is wrong with it, the checks have said
            return False
        finally:
            subject.model.zero_grad(set_to_none=True)
        return True
