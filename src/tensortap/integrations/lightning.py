"""`Watch`, a callback for the Trainer of Lightning."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback  # the two packages do not take each other's callbacks
else:
    from lightning import Callback

from tensortap.integrations.training import TrainingSession, numbers_in


class LightningWatch(TrainingSession, Callback):  # type: ignore[misc]  # the base is untyped
    """Observe a LightningModule: `Watch(...)` takes what `tt.watch` takes.

    >>> from tensortap.integrations.lightning import Watch
    >>> watching = Watch("**", "**:grad", to="runs/exp1", context=True)    # doctest: +SKIP
    >>> Trainer(callbacks=[watching]).fit(module, loader)                  # doctest: +SKIP
    >>> watching.tap.run.findings()                                        # doctest: +SKIP

    A step is a step of the optimizer, micro-batches included, and has Lightning's number. Its loss, the mean of its
    micro-batches, is a metric; `metrics=["acc"]` adds what the module logged under these names. Validation is left out,
    unless `evaluation=True`. The taps come off at the end, and after an exception.
    """

    def __init__(self, *probes: Any, metrics: Iterable[str] = (), **options: Any) -> None:
        super().__init__(*probes, **options)
        self._names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        self._losses: list[Any] = []
        self._seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the taps on."""
        self._losses, self._seen = [], trainer.global_step
        self.begin(pl_module, trainer.global_step, trainer.global_rank)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Observe a micro-batch."""
        self.enter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close the step if an optimizer has stepped; otherwise this was one of its micro-batches."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._losses += [] if loss is None else [loss.detach()]
        if trainer.global_step != self._seen:
            self._seen, losses, self._losses = trainer.global_step, self._losses, []
            # Lightning has divided the loss of a micro-batch by their number already, unless the module steps itself.
            parts = 1 if pl_module.automatic_optimization else len(losses)
            mean = {"loss": float(sum(losses)) / parts} if losses else {}
            self.step(trainer.global_step - 1, **mean, **self._logged(trainer))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave validation out of the step."""
        self.leave()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *more: Any, **also: Any) -> None:
        """Close a batch of a validation."""
        self.evaluated()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the taps off; what was recorded is kept."""
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the taps off and write everything."""
        self.close()

    def _logged(self, trainer: Any) -> dict[str, float]:
        found = trainer.callback_metrics
        return numbers_in({name: found[name].item() for name in self._names if name in found})


Watch = LightningWatch
