"""`Watch`, a callback for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tensortap.integrations.training import TrainingSession, numbers_in


class HFWatch(TrainingSession, TrainerCallback):  # type: ignore[misc]  # the base is untyped
    """Observe a Trainer's model: `Watch(...)` takes what `tt.watch` takes.

    >>> from tensortap.integrations.hf import Watch
    >>> watching = Watch("**", "**:grad", to="runs/exp1", context=True)    # doctest: +SKIP
    >>> Trainer(model, args, callbacks=[watching], ...).train()            # doctest: +SKIP
    >>> watching.tap.run.findings()                                        # doctest: +SKIP

    A step is a step of the optimizer, micro-batches included, and has the Trainer's number, counted from 0. What the
    Trainer logs of a step are its metrics: with `logging_steps=1`, triggers see every loss. Evaluation is left out,
    unless `evaluation=True`. The Trainer does not tell callbacks of an exception: `with Watch(...) as watching:` around
    `train()` takes the taps off then too.
    """

    def __init__(self, *probes: Any, **options: Any) -> None:
        super().__init__(*probes, **options)
        self._waiting = False  # for the metrics of a step that is over

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Put the taps on."""
        self._waiting = False
        self.begin(model, state.global_step, args.process_index)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Observe the first micro-batch of a step."""
        self.enter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Close the step, or wait for its metrics if they are about to be logged."""
        self._waiting = control.should_log
        if not self._waiting:
            self.step(state.global_step - 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Close the step with the logged metrics. The Trainer logs before it evaluates."""
        if self._waiting:
            self._waiting = False
            self.step(state.global_step - 1, **numbers_in(logs))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Close a batch of an evaluation."""
        self.evaluated()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Take the taps off and write everything."""
        self.close()


Watch = HFWatch
