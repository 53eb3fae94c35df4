"""The training loop as it runs: the order of calls, backward, reset of gradients and steps of each optimizer.

Whether gradients were reset is read from the gradients themselves, by identity and version counter, of one parameter
of each optimizer: so it does not matter how the script resets them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection
from typing import Any, Final

from tensortap.adapters.torch.context.optimizers import OptimizerRecord

FRESH: Final = "fresh"  # there was no gradient, or it had been reset after the last step
STALE: Final = "stale"  # the gradient from before the last step is still there
ADDED: Final = "added"  # added to that of another backward since the last step
RESET: Final = "reset"  # the gradient of another backward since the last step was discarded
_MOST_STATES: Final = 64


class GradientWatch:
    """The gradient of one parameter of an optimizer, before and after each backward and step."""

    def __init__(self, record: OptimizerRecord) -> None:
        self.record = record
        self.states: list[str] = []  # of each backward that reached the parameter since the last step
        self._sample: weakref.ref[Any] | None = None
        self._mark: tuple[int, int] | None = None  # identity and version of the gradient when it was last looked at
        self._stepped = True  # since then the optimizer has stepped
        self._state = FRESH
        self._begun: tuple[int, int] | None = None

    def backward_begins(self) -> None:
        """Note the gradient before a backward."""
        mark = self._begun = self._now()
        if mark is None or self._mark is None:
            self._state = FRESH if self._stepped else RESET if self._mark is not None else FRESH
        elif mark == self._mark:
            self._state = STALE if self._stepped else ADDED
        else:
            self._state = self._changed()

    def _changed(self) -> str:
        parameter = None if self._sample is None else self._sample()
        empty = parameter is None or parameter.grad is None or not bool(parameter.grad.detach().any())
        return (FRESH if self._stepped else RESET) if empty else (FRESH if self._stepped else ADDED)

    def backward_ended(self) -> None:
        """Note what a backward has changed."""
        self._find_sample()
        now = self._now()
        if now is None or now == self._begun:
            return  # it did not reach this parameter
        if len(self.states) < _MOST_STATES:
            self.states.append(self._state)
        self._mark, self._stepped = now, False

    def stepped(self) -> None:
        """Note the gradient after the optimizer's step."""
        self._mark, self._stepped = self._now(), True
        self.states = []

    def _now(self) -> tuple[int, int] | None:
        parameter = None if self._sample is None else self._sample()
        gradient = None if parameter is None else parameter.grad
        return None if gradient is None else (id(gradient), gradient._version)

    def _find_sample(self) -> None:
        if self._sample is not None and self._sample() is not None:
            return
        for reference in self.record.parameters.values():
            parameter = reference()
            if parameter is not None and parameter.grad is not None and not parameter.grad.is_sparse:
                self._sample = reference
                return


class LoopState:
    """Counts over the whole training, and what happened since the last step of an optimizer."""

    def __init__(self) -> None:
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self._watches: dict[int, GradientWatch] = {}
        self._calls: Counter[str] = Counter()  # by mode, since the last step
        self._backwards = 0
        self._losses = 0
        self._pending_calls = 0  # with gradients, since the last backward
        self._per_backward: Counter[int] = Counter()
        self._plain_call: str | None = None  # the model that was called last, without gradients and in training mode
        self._evaluated: Counter[str] = Counter()  # calls of each model that look like evaluations in training mode
        self._without_dropout: set[str] = set()  # models called with gradients in evaluation mode since the last step
        self._in_eval_mode: Counter[str] = Counter()  # steps of training of each model in evaluation mode
        self._reported: dict[int, tuple[Any, ...]] = {}
        self._same: Counter[int] = Counter()

    def called(self, model: str, mode: str, depends: bool) -> None:
        """Note a call of a model; `depends` says whether its output depends on the mode."""
        self._calls[mode] += 1
        if mode == "train_no_grad" and depends:
            self._evaluated[model] += self._plain_call == model
            self._plain_call = model
        elif not mode.endswith("no_grad"):
            self._pending_calls += 1
            if mode == "eval" and depends:
                self._without_dropout.add(model)
            # The model goes on to train: its output without gradients was not for another model.
            self._evaluated[model] += self._plain_call == model
            self._plain_call = None

    def loss(self, gradients: bool) -> None:
        """Note a call of a loss; one without gradients, of a model in training mode, is an evaluation."""
        self._losses += 1
        if not gradients and self._plain_call is not None:
            self._evaluated[self._plain_call] += 1

    def backward_begins(self) -> None:
        """Note that gradients are about to be computed."""
        self._backwards += 1
        self.counts["backwards"] += 1
        self._per_backward[self._pending_calls] += 1
        self._pending_calls = 0
        self._plain_call = None
        for watch in self._watches.values():
            watch.backward_begins()

    def backward_ended(self) -> None:
        """Note that gradients were computed."""
        for watch in self._watches.values():
            watch.backward_ended()

    def watch(self, record: OptimizerRecord) -> None:
        """Follow the gradients of an optimizer."""
        self._watches[record.number] = GradientWatch(record)
        if len(self._watches) > 8:  # optimizers that are made again and again: the last ones count
            del self._watches[min(self._watches)]

    def before_step(
        self, record: OptimizerRecord, has_gradients: bool | None, closure: bool = False
    ) -> dict[str, Any] | None:
        """Note a step; return the calls that led to it if they differ from those of the optimizer's previous step.

        Of a step with a closure, which may compute gradients many times, the last evaluation counts.
        """
        watch = self._watches.get(record.number)
        states = [] if watch is None else list(watch.states)
        used = _since_reset(states)
        if closure:
            states = used
        self.counts["steps_looked_at"] += has_gradients is not None
        self.counts["steps_without_gradients"] += has_gradients is False
        self.counts["steps_without_backward"] += not self._backwards
        self.counts["steps_on_stale_gradients"] += bool(used) and used[0] == STALE
        self.counts["backwards_thrown_away"] += len(states) - len(used)
        if not self._calls["train"]:
            self._in_eval_mode.update(self._without_dropout)
        self.counts["steps_in_train_mode"] += self._calls["train"] > 0
        signature = (
            self._backwards,
            tuple(states),
            has_gradients is not False,
            tuple(sorted(self._calls)),
        )
        self._same[record.number] += 1
        if self._reported.get(record.number) == signature:
            return None
        self._reported[record.number] = signature
        return {
            "number": record.number, "backwards": self._backwards, "gradients": states,
            "has_gradients": has_gradients is not False,
            "calls": dict(self._calls), "losses": self._losses, "steps": self.steps,
        }  # fmt: skip

    def after_step(self, record: OptimizerRecord) -> None:
        """Note that an optimizer has stepped."""
        self.steps += 1
        watch = self._watches.get(record.number)
        if watch is not None:
            watch.stepped()
        for other in self._watches.values():
            other.states = []  # gradients discarded before belong to another optimizer
        self._calls.clear()
        self._without_dropout.clear()
        self._backwards = self._losses = 0

    def totals(self, trained: Collection[str]) -> dict[str, Any]:
        """Return the counts of the whole training.

        `trained` are the models that an optimizer trains: a teacher, or the average of a model, computes targets in
        training mode, which is no evaluation; and a model that computes features in evaluation mode is not trained.
        """
        per_backward = {str(calls): n for calls, n in self._per_backward.most_common(8)}
        evaluated = sum(n for model, n in self._evaluated.items() if model in trained)
        in_eval_mode = max((n for model, n in self._in_eval_mode.items() if model in trained), default=0)
        return {**self.counts, "steps": self.steps, "calls_per_backward": per_backward,
                "trained_in_eval_mode": in_eval_mode,
                "eval_in_train_mode": evaluated, "calls_after_last_backward": self._pending_calls}  # fmt: skip


def _since_reset(states: list[str]) -> list[str]:
    """Return the states of the backward passes whose gradients are still there."""
    last = 0
    for i, state in enumerate(states):
        if state in (FRESH, RESET):
            last = i
    return states[last:]
